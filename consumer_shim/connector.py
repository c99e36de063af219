"""vLLM's EC connector: `ec_connector_module_path: consumer_shim.connector`, `ec_connector: ECProducerConnector`.

Delegation only: the engine's scheduler process has a `SchedulerSide`, its workers have a `WorkerSide` each.
"""

import functools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput

from consumer_shim import plugin
from consumer_shim.config import ShimConfig
from consumer_shim.landing import Landing
from consumer_shim.logs import join_vllm
from consumer_shim.pairing import RequestItem
from consumer_shim.scheduler import Load, SchedulerSide
from consumer_shim.side_channel import SideChannel
from consumer_shim.tickets import PullTicket, from_params
from consumer_shim.worker import WorkerSide
from producer.wire import tracing
from producer.wire.families import EXTRA_FIELDS, embedding_width, num_deepstack_levels
from producer.wire.origin import ORIGIN_PARAM, Origin

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class ShimMetadata(ECConnectorMetadata):
    """Scheduler → workers, each step: what to load, and where the landing region is."""

    pid: int
    fd: int
    loads: list[Load] = field(default_factory=list)


@dataclass
class ShimWorkerMetadata(ECConnectorWorkerMetadata):
    """Workers → scheduler: what they have loaded."""

    loaded: set[int]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "ShimWorkerMetadata":
        assert isinstance(other, ShimWorkerMetadata)
        return ShimWorkerMetadata(self.loaded | other.loaded)


class ECProducerConnector(ECConnectorBase):
    """Pulls embeddings from ec-producer for requests that carry its tickets."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        transfer = vllm_config.ec_transfer_config
        assert transfer is not None
        if transfer.ec_role != "ec_consumer":
            raise ValueError(f"ec_role is {transfer.ec_role!r}; ECProducerConnector serves 'ec_consumer' only")
        config = ShimConfig.from_extra_config(transfer.ec_connector_extra_config)
        model_config = vllm_config.model_config
        if num_deepstack_levels(model_config.hf_config) and not plugin.is_installed():
            raise ValueError("this model needs vLLM's plugin 'ec_producer' (DeepStack); VLLM_PLUGINS leaves it out")
        if role is ECConnectorRole.WORKER:
            self._worker = WorkerSide(torch.device(current_platform.device_type))
            return
        self._resolver = PlaceholderMetadataResolver(model_config)
        join_vllm()
        self._tracing = tracing.start(config.otlp_traces_endpoint, config.trace_sample_ratio, "ec-producer-shim")
        self._landing = Landing(config, self._tracing)
        self._scheduler = SchedulerSide(
            self._landing.store,
            self._landing.start,
            addresses=config.producers,
            width=functools.partial(embedding_width, model_config),
            dtype=str(model_config.dtype).removeprefix("torch."),
            pull_timeout_s=config.pull_timeout_s,
        )
        self._side_channel = SideChannel(
            str(transfer.engine_id), self._scheduler.failure_of, self._scheduler.leave_tickets
        )

    # Scheduler

    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        return self._scheduler.is_ready(
            request.request_id,
            num_computed_tokens,
            lambda: self._describe(request),
            lambda: Origin.from_params((request.ec_transfer_params or {}).get(ORIGIN_PARAM)),
        )

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        self._scheduler.load(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ShimMetadata:
        self._landing.settle()
        loads = self._scheduler.take_loads(scheduler_output.free_encoder_mm_hashes)
        return ShimMetadata(os.getpid(), self._landing.region.fd, loads)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        meta = connector_output.ec_connector_worker_meta
        if isinstance(meta, ShimWorkerMetadata):
            self._scheduler.loaded(meta.loaded)

    def take_unavailable_requests(self) -> set[str]:
        return self._scheduler.take_unavailable()

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finish(request.request_id)
        return False, None

    def get_ec_connector_stats(self) -> Any:
        """Pulls that have ended since the last call, where this is the scheduler's side. For vLLM's loggers."""
        if self.role is ECConnectorRole.WORKER:
            return None
        from consumer_shim.pull_metrics import PullStats

        return PullStats.take(self._landing.ended)

    def _describe(self, request: "Request") -> tuple[list[RequestItem], list[PullTicket]]:
        items = [
            RequestItem(
                identifier=feature.identifier,
                modality=feature.modality,
                end=feature.mm_position.offset + feature.mm_position.length,
                num_rows=request.get_num_encoder_embeds(index),
                is_in_band=bool(feature.data) and not feature.data.keys() <= self._metadata_fields(feature.modality),
            )
            for index, feature in enumerate(request.mm_features)
        ]
        return items, from_params(request.ec_transfer_params)

    def _metadata_fields(self, modality: str) -> set[str]:
        """Fields that an item may bring although it has no embedding of its own."""
        declared = self._resolver.fields_for(modality)
        return declared | EXTRA_FIELDS.get(modality, frozenset()) if declared else set()

    # Worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, ShimMetadata)
        self._worker.load(encoder_cache, meta.loads, meta.pid, meta.fd)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Nothing: a consumer saves no embeddings."""

    def build_connector_worker_meta(self) -> ShimWorkerMetadata | None:
        loaded = self._worker.take_loaded()
        return ShimWorkerMetadata(set(loaded)) if loaded else None

    # The API server's process

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """What `get_ec_connector_stats` gave in the engine's process."""
        from consumer_shim.pull_metrics import PullStats

        return PullStats.of(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """The pulls in vLLM's `/metrics`."""
        from consumer_shim.pull_metrics import PullMetrics

        return PullMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Both

    def shutdown(self) -> None:
        if self.role is ECConnectorRole.WORKER:
            self._worker.close()
            return
        self._side_channel.close()
        self._landing.close()
        if self._tracing is not None:
            self._tracing.close()
