"""The composition root: builds the stages in the order of the flow, takes them down in reverse."""

import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from producer import early_checks, fork_server, lifecycle, process_setup, security, warm_up
from producer.admission import Admission
from producer.calls import CallRecorder
from producer.config import ServeConfig, split_address
from producer.core import ModelInfo, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.file_outlet import FileOutlet
from producer.health import Health
from producer.http_server import HttpServer
from producer.memory.region import SharedRegion
from producer.messages import model_info
from producer.metrics import Metrics
from producer.preprocess import Preprocessor
from producer.publisher import Publisher
from producer.recent_errors import RecentErrors
from producer.server import Servicer
from producer.status import Status
from producer.status_page import StatusPage
from producer.step_loop import StepLoop
from producer.transport import registry
from producer.transport.base import Outlet
from producer.transport.shm import ShmOutlet
from producer.transport.stream import StreamOutlet
from producer.wire.contract import GRPC_TRANSPORT, SERVICE_NAME, SHM_TRANSPORT
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import add_EncoderCacheServicer_to_server
from producer.wire.tracing import Tracing
from producer.wire.tracing import start as start_tracing

if TYPE_CHECKING:
    from producer.runner.encoder import VllmEncoder

logger = logging.getLogger(__name__)

_BATCH_ROWS, _BATCH_ROWS_ON_CPU = 2048, 512
"""Of steps; more would gain nothing, and have each item wait for more others."""
_PUBLISHERS = 2
"""Threads that copy embeddings to the pool while the step loop goes on; on a CPU the encoder needs the cores."""


async def serve(config: ServeConfig) -> None:
    """Runs a producer until SIGTERM or SIGINT, then drains it.

    Raises:
        UnsupportedModelError: the model cannot be served.
        OSError: an address is taken, or the pool does not fit.
        TransportUnavailableError, TransportError: a transport that was asked for cannot be used.
    """
    metrics, errors = Metrics(), RecentErrors()
    status = Status(config, metrics.registry, errors)
    async with AsyncExitStack() as stack:
        _serve_metrics(config, StatusPage(status, metrics.registry), stack)
        status.enter("loading the model")
        encoder = _read_model(config)
        tracing = start_tracing(config.otlp_traces_endpoint, config.trace_sample_ratio, "ec-producer")
        if tracing is not None:
            stack.callback(tracing.close)
        server, address = _listen(config, metrics, tracing)
        status.enter("opening the pool and its transports")
        region = stack.enter_context(SharedRegion.create("ec-producer-pool", config.pool_bytes))
        epoch = secrets.randbits(64)
        pool = _open_pool(config, region, epoch, metrics)
        preprocessor = _start_preprocessor(config, encoder, metrics, stack)
        outlets = _open_outlets(config, region, stack)
        files = _open_files(config, pool)
        status.enter("loading the weights")
        model = _load(encoder, region, metrics, stack)
        status.enter("preparing test items")
        samples = [await warm_up.prepare_sample(preprocessor, model, modality) for modality in model.widths]
        status.enter("planning memory and capturing graphs")
        process_setup.freeze()  # planning collects garbage again and again
        loop = _start_steps(config, encoder, samples, pool, metrics, stack, tracing)
        admission = _open_admission(config, pool, preprocessor, loop, model, files, metrics, tracing)
        stop = lifecycle.stop_signal()
        status.enter("encoding test items")
        await warm_up.encode_samples(admission, pool, model)
        place = outlets[SHM_TRANSPORT].describe().peer
        info = model_info(config, model, epoch=epoch, address=address, shared_memory=place)
        servicer = _servicer(config, admission, pool, outlets, info, metrics, errors)
        add_EncoderCacheServicer_to_server(servicer, server)
        checks = lifecycle.probes(loop, preprocessor, outlets, stall_s=config.stall_s)
        watched = Health(_add_health(server), checks, metrics)
        process_setup.freeze()
        await server.start()
        status.serve(model, watched, info.epoch)
        logger.info("ready: %s on %s, transports %s", model.model, address, ", ".join(outlets))
        sweeps = [pool.expire, *([files.expire] if files else [])]
        await lifecycle.watch(stop, watched, loop, sweeps, stall_exit_s=config.stall_exit_s)
        status.drain(config.drain_s)
        await lifecycle.drain(admission, pool, server, config.drain_s)


def _listen(config: ServeConfig, metrics: Metrics, tracing: Tracing | None = None) -> tuple[grpc.aio.Server, str]:
    """A server that has its port, and what tickets name."""
    credentials = security.server_credentials(config.tls_cert, config.tls_key, config.tls_client_ca)
    server = grpc.aio.server(
        interceptors=[
            CallRecorder(metrics, tracing),
            *([security.TokenInterceptor(config.token_file)] if config.token_file else ()),
        ],
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", 30_000),  # finds clients that froze or lost their network
            ("grpc.keepalive_timeout_ms", 10_000),
            *(security.TLS_OPTIONS if credentials else ()),
        ],
    )
    try:
        port = security.add_port(server, config.listen, credentials)
    except RuntimeError:
        raise early_checks.address_error(config.listen) from None
    security.warn_of_open_doors(
        split_address("listen", config.listen)[0],
        has_tls=bool(config.tls_cert),
        has_client_ca=bool(config.tls_client_ca),
        has_tokens=bool(config.token_file),
    )
    return server, config.advertise or f"{config.listen.rpartition(':')[0]}:{port}"


def _serve_metrics(config: ServeConfig, page: StatusPage, stack: AsyncExitStack) -> None:
    """From the first moment to the last, so that a start that takes minutes can be watched."""
    host, port = split_address("metrics_listen", config.metrics_listen)
    try:
        http = HttpServer(host, port, page)
    except OSError as error:
        raise OSError(f"metrics_listen is {config.metrics_listen}: {error.strerror}") from None
    stack.callback(http.close)
    http.start()


def _open_pool(config: ServeConfig, region: SharedRegion, epoch: int, metrics: Metrics) -> EmbeddingPool:
    """An empty pool whose figures are read at each scrape."""
    pool = EmbeddingPool(
        region,
        epoch=epoch,
        lease_s=config.lease_s,
        max_leases=config.max_leases,
        on_expiry=metrics.count_expiry,
    )
    store = pool.store
    metrics.pool_bytes.set_function(lambda: store.num_bytes)
    metrics.pool_used_bytes.set_function(lambda: store.used_bytes)
    metrics.pool_entries.set_function(lambda: store.num_blocks)
    metrics.pool_pinned_entries.set_function(lambda: store.num_pinned)
    metrics.pool_leases.set_function(lambda: pool.num_leases)
    metrics.pool_evictions.set_function(lambda: store.num_evictions)
    metrics.leases_granted.set_function(lambda: pool.num_granted)
    metrics.leases_expired.set_function(lambda: pool.num_expired)
    return pool


def _open_outlets(config: ServeConfig, region: SharedRegion, stack: AsyncExitStack) -> dict[str, Outlet]:
    own: dict[str, Callable[[], Outlet]] = {SHM_TRANSPORT: lambda: ShmOutlet(region), GRPC_TRANSPORT: StreamOutlet}
    outlets: dict[str, Outlet] = {}
    for name in config.transports:
        outlet = own[name]() if name in own else registry.open_outlet(name, region, config.transport_options[name])
        stack.callback(outlet.close)
        outlets[name] = outlet
    return outlets


def _open_files(config: ServeConfig, pool: EmbeddingPool) -> FileOutlet | None:
    if not config.publish_files:
        return None
    return FileOutlet(
        Path(config.publish_files),
        pool,
        max_bytes=config.publish_files_bytes,
        max_age_s=config.publish_files_age_s,
    )


def _read_model(config: ServeConfig) -> "VllmEncoder":
    """Imports vLLM, reads the model's configuration, and has processes share both: from here on they are its forks.

    What must not be in them comes later: credentials, the pool, gRPC, the device. What can be seen to be wrong with
    those is said before, since this takes long.
    """
    with early_checks.claimed(config.listen):
        early_checks.check(config)
        with fork_server.one_thread():
            encoder = _make_encoder(config)
            process_setup.freeze()
            fork_server.start()
    return encoder


def _make_encoder(config: ServeConfig) -> "VllmEncoder":
    from producer import preprocess_worker  # noqa: F401  # for the processes
    from producer.decode import MODALITIES
    from producer.runner.encoder import VllmEncoder

    return VllmEncoder(
        model=config.model,
        dtype=config.dtype,
        mm_encoder_attn_backend=config.mm_encoder_attn_backend,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        mm_processor_kwargs=config.mm_processor_kwargs,
        media_io_kwargs=config.media_io_kwargs,
        modalities=MODALITIES,
        fidelity=config.fidelity,
        compile_mm_encoder=config.compile_mm_encoder,
    )


def _start_preprocessor(
    config: ServeConfig, encoder: "VllmEncoder", metrics: Metrics, stack: AsyncExitStack
) -> Preprocessor:
    """Its processes start while the weights are loaded."""
    from producer.media_limits import MediaLimits

    preprocessor = Preprocessor(
        encoder.model_config,
        encoder.forms,
        config.preprocess_workers,
        max_rows=config.max_item_rows,
        timeout_s=config.preprocess_timeout_s,
        memory_bytes=config.preprocess_memory_bytes,
        limits=MediaLimits(
            max_pixels=config.max_item_pixels,
            max_video_pixels=config.max_video_pixels,
            max_video_frames=config.max_video_frames,
            max_audio_s=config.max_audio_s,
        ),
        hashes=bool(config.publish_files),
        metrics=metrics,
    )
    stack.callback(preprocessor.close)
    preprocessor.start()
    return preprocessor


def _load(encoder: "VllmEncoder", region: SharedRegion, metrics: Metrics, stack: AsyncExitStack) -> ModelInfo:
    from producer.runner.pinned import pinned

    stack.callback(encoder.close)
    model = encoder.load()
    stack.enter_context(pinned(region.address, region.num_bytes, encoder.device))
    versions = {name: model.versions.get(name, "") for name in ("torch", "vllm")}
    metrics.model.info({"model": model.model, "dtype": model.dtype, "attention": model.attention_backend, **versions})
    return model


def _start_steps(
    config: ServeConfig,
    encoder: "VllmEncoder",
    samples: Sequence[PreparedItem],
    pool: EmbeddingPool,
    metrics: Metrics,
    stack: AsyncExitStack,
    tracing: Tracing | None = None,
) -> StepLoop:
    from producer.runner.engine import EngineSettings, start_engine

    is_cpu = encoder.device.type == "cpu"
    batch_rows = config.max_batch_rows or (_BATCH_ROWS_ON_CPU if is_cpu else _BATCH_ROWS)
    config = dataclasses.replace(config, max_batch_rows=batch_rows)
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineSettings)}
    runner = start_engine(encoder, samples, EngineSettings(**settings), metrics)
    loop = StepLoop(
        runner.launch,
        Publisher(pool).publish,
        max_rows=config.max_batch_rows,
        max_items=config.max_batch_items,
        max_steps=1 if is_cpu else config.steps_in_flight,
        num_publishers=0 if is_cpu else _PUBLISHERS,
        metrics=metrics,
        tracing=tracing,
    )
    loop.start()
    encoder.on_progress(loop.tick)
    stack.callback(lifecycle.stop_steps, loop)
    return loop


def _open_admission(
    config: ServeConfig,
    pool: EmbeddingPool,
    preprocessor: Preprocessor,
    loop: StepLoop,
    model: ModelInfo,
    files: FileOutlet | None,
    metrics: Metrics,
    tracing: Tracing | None,
) -> Admission:
    return Admission(
        pool,
        preprocessor.submit,
        loop.submit,
        fingerprint=model.fingerprint,
        modalities=tuple(model.widths),
        max_queue_items=config.max_queue_items,
        max_item_bytes=config.max_item_bytes,
        max_queue_bytes=config.max_queue_bytes,
        item_timeout_s=config.item_timeout_s,
        metrics=metrics,
        also=files.ensure if files else None,
        tracing=tracing,
    )


def _servicer(
    config: ServeConfig,
    admission: Admission,
    pool: EmbeddingPool,
    outlets: Mapping[str, Outlet],
    info: pb.GetModelInfoResponse,
    metrics: Metrics,
    errors: RecentErrors,
) -> Servicer:
    return Servicer(
        admission,
        pool,
        outlets,
        info,
        metrics,
        settings=config.media_settings,
        errors=errors,
        max_streams=config.max_streams,
        stream_idle_s=config.stream_idle_s,
    )


def _add_health(server: grpc.aio.Server) -> health.aio.HealthServicer:
    statuses = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return statuses
