"""The cases that are counted, each in a state in which every cache is warm and nothing grows any more.

Not counted: the processes and threads between the event loop and preprocessing, and gRPC's own.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import torch

from producer.admission import Admission
from producer.calls import CallRecorder
from producer.core import MediaItem, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.media_limits import MediaLimits
from producer.memory.region import SharedRegion
from producer.metrics import Metrics
from producer.publisher import Publisher
from producer.server import Servicer
from producer.step_loop import StepLoop
from producer.transport.stream import StreamOutlet
from producer.wire import random_ids
from producer.wire.contract import SERVICE_NAME, WIRE_VERSION
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.counting import Calls, count_operators, counted_calls
from tests.kit.engines import Engine
from tests.kit.photos import photos
from tests.kit.steps import Done
from tests.unit.counts.table import Measures

FAMILY = "qwen2_5_vl"
STEP_ITEMS = (1, 8, 16)
CALL_ITEMS = (1, 8, 16)
SIDE, LARGE_SIDE = 224, 448
POOL_BYTES = 1 << 18
"""Room for a step and little more: it is full when counting begins, so evictions are counted too."""
_WARM = 10
"""Times that something comes before it is counted: steps are recorded by then."""
_EPOCH = 7


@contextmanager
def tiny() -> Iterator[Engine]:
    """The tiny Qwen2.5-VL, loaded, without graphs, and watched as the step loop watches it: as it is in the service."""
    from producer import preprocess_worker
    from producer.runner.encoder import VllmEncoder  # here, since it takes seconds

    encoder = VllmEncoder(
        model=str(cached_checkpoint(FAMILY)),
        dtype="auto",
        mm_encoder_attn_backend="auto",
        revision="",
        trust_remote_code=False,
        mm_processor_kwargs={},
        media_io_kwargs={},
        modalities=("image",),
    )
    try:
        encoder.load()
        encoder.on_progress(lambda: None)
        work = preprocess_worker.make(encoder.model_config, encoder.forms, MediaLimits())
        yield Engine(encoder=encoder, graphs=None, runner=None, eager=None, metrics=Metrics(), work=work, family=FAMILY)
    finally:
        encoder.close()


@contextmanager
def new_pool(num_bytes: int = POOL_BYTES) -> Iterator[EmbeddingPool]:
    with SharedRegion.create("ec-producer-test", num_bytes) as region:
        yield EmbeddingPool(region, epoch=_EPOCH, lease_s=60.0, max_leases=1 << 20)


class Steps:
    """The encoder of the tiny Qwen2.5-VL as the service has it on a CPU: its slots, its steps, publishing."""

    def __init__(self, one: Engine, pool: EmbeddingPool) -> None:
        from producer.runner.engine import EngineSettings, start_engine  # here, since it takes seconds

        settings = EngineSettings(
            eager=False,
            require_graphs=False,
            graph_rows=4096,
            graph_items=32,
            num_slots=3,
            slot_bytes=32 << 20,
            max_batch_rows=2048,
            max_item_rows=16384,
            device_memory_bytes=0,
        )
        self._one = one
        self._made: dict[int, list[PreparedItem]] = {}
        self._numbers = iter(range(1 << 30))
        self._publish = Publisher(pool).publish
        self.runner: Any = start_engine(one.encoder, [one.sample()], settings, Metrics())

    def items(self, number: int, side: int = SIDE) -> list[PreparedItem]:
        """Pictures that are in no pool."""
        while len(made := self._made.setdefault(side, [])) < number:
            made.append(self._one.image(side, side, len(made)))
        return [replace(item, key=f"{next(self._numbers):064x}") for item in made[:number]]

    def run(self, items: list[PreparedItem]) -> None:
        """Launches a step of `items`, finishes it and publishes what came of it."""
        for item, embedding in zip(items, self.runner.launch(items).finish(), strict=True):
            self._publish(item, embedding)

    def count(self, number: int, side: int = SIDE) -> Measures:
        """What a step of `number` pictures of `side`² pixels takes."""
        for _ in range(_WARM):
            self.run(self.items(number, side))
        operated, called = self.items(number, side), self.items(number, side)
        return _measures(lambda: self.run(operated), lambda: self.run(called))


def count_preprocessing(work: Callable[[Any], Any]) -> Measures:
    """What a preprocessing process does of one JPEG file."""
    from producer import preprocess_worker

    request = preprocess_worker.request(MediaItem(modality="image", data=photos()["astronaut.jpg"].data))
    for _ in range(_WARM):
        work(request)
    return _measures(lambda: work(request), lambda: work(request))


def _measures(operated: Callable[[], object], called: Callable[[], object]) -> Measures:
    """Of the same work, done twice: what watches operators calls functions itself."""
    found = vars(count_operators(operated))
    with counted_calls() as calls:
        called()
    return {**found, "calls": _outside_tests(calls)}


def _fill_ids() -> None:
    """Or the stock of ids would be filled again in whichever case uses the last one."""
    random_ids._ready.clear()
    random_ids.random_id()


def _outside_tests(calls: Calls) -> "Counter[str]":
    return Counter({name: n for name, n in calls.by_function.items() if not name.startswith("tests/")})


class Service:
    """All between gRPC and the device, on one thread: servicer, admission, step loop, publisher and pool.

    Not real: preprocessing, which is done at once; the encoder, whose embeddings are there already; gRPC, whose context
    says the same of every call. The step loop's turns are taken by the test, where it has a thread in the service.
    """

    def __init__(self, pool: EmbeddingPool) -> None:
        self._numbers = iter(range(1 << 30))
        self._preparing: list[tuple[Future[PreparedItem], PreparedItem]] = []
        metrics = Metrics()
        self._loop = StepLoop(
            self._launch, Publisher(pool).publish, max_rows=1 << 17, max_items=max(CALL_ITEMS), metrics=metrics
        )
        info = pb.GetModelInfoResponse(fingerprint="f" * 64, epoch=f"{_EPOCH:016x}", wire_version=WIRE_VERSION)
        info.limits.max_items_per_request = max(CALL_ITEMS)
        info.limits.max_request_bytes = 1 << 20
        admission = Admission(
            pool,
            self._prepare,
            self._loop.submit,
            fingerprint=info.fingerprint,
            modalities=("image",),
            max_queue_items=64,
            max_item_bytes=1 << 20,
            metrics=metrics,
        )
        self._servicer = Servicer(admission, pool, {"grpc": StreamOutlet()}, info, metrics, settings={})
        self._recorder = CallRecorder(metrics)
        self._handlers: dict[str, Any] = {}
        self._embedding = torch.zeros(64, 64, dtype=torch.bfloat16)

    def count_encode(self, number: int, *, repeated: bool = False) -> Measures:
        """An Encode of `number` pictures that are new, or that the pool has."""

        async def count() -> Calls:
            for _ in range(_WARM):
                await self._release(await self._encode(request := self._request(number)))
            request = request if repeated else self._request(number)
            _fill_ids()
            with counted_calls() as calls:
                response = await self._encode(request)
            await self._release(response)
            return calls

        return self._of(asyncio.run(count()))

    def count_read(self) -> Measures:
        """An Acquire and a Release: all that a consumer asks of the producer whose memory it reads itself."""

        async def count() -> Calls:
            tickets = [one.ticket for one in (await self._encode(self._request(_WARM + 1))).outcomes]
            for ticket in tickets[1:]:
                await self._read(ticket)
            _fill_ids()
            with counted_calls() as calls:
                await self._read(tickets[0])
            return calls

        return self._of(asyncio.run(count()))

    def _of(self, calls: Calls) -> Measures:
        asked = {"tasks": calls.named("create_task"), "wake-ups": calls.named("call_soon_threadsafe")}
        return {**asked, "calls": _outside_tests(calls)}

    def _request(self, number: int) -> pb.EncodeRequest:
        files = [f"picture {next(self._numbers)}".encode() for _ in range(number)]
        return pb.EncodeRequest(items=[pb.MediaItem(modality=pb.MODALITY_IMAGE, data=file) for file in files])

    async def _encode(self, request: pb.EncodeRequest) -> Any:
        call = asyncio.ensure_future(self._call("Encode", request))
        while not call.done():
            await asyncio.sleep(0)
            if len(self._preparing) == len(request.items):
                self._go_on()
        return call.result()

    async def _release(self, response: Any) -> None:
        for outcome in response.outcomes:
            await self._call("Release", pb.ReleaseRequest(lease_id=outcome.ticket.lease_id))

    async def _read(self, ticket: pb.Ticket) -> None:
        request = pb.AcquireRequest(
            key=ticket.key, epoch=ticket.epoch, lease_id=ticket.lease_id, transport="grpc", wire_version=WIRE_VERSION
        )
        found = await self._call("Acquire", request)
        await self._call("Release", pb.ReleaseRequest(lease_id=found.lease_id))

    async def _call(self, method: str, request: Any) -> Any:
        """As gRPC's server calls a method, which is looked up and recorded each time."""
        if method not in self._handlers:
            self._handlers[method] = grpc.unary_unary_rpc_method_handler(getattr(self._servicer, method))

        async def lookup(details: Any) -> Any:
            return self._handlers[method]

        details: Any = SimpleNamespace(method=f"/{SERVICE_NAME}/{method}", invocation_metadata=())
        recorded = await self._recorder.intercept_service(lookup, details)
        return await recorded.unary_unary(request, _Context())

    def _prepare(self, key: str, item: MediaItem) -> "Future[PreparedItem]":
        part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 16, 16]}}
        prepared = PreparedItem(key=key, modality=item.modality, num_rows=64, content_part=part, inputs=None)
        self._preparing.append((Future(), prepared))
        return self._preparing[-1][0]

    def _go_on(self) -> None:
        """Everything was preprocessed, and shares a step."""
        for future, prepared in self._preparing:
            future.set_result(prepared)
        self._preparing.clear()
        self._loop._turn()

    def _launch(self, items: Any) -> Done:
        return Done([self._embedding] * len(items))


class _Context:
    """gRPC's context of a call from this host without a deadline, as far as the service asks."""

    def time_remaining(self) -> None:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:40000"

    def peer_identities(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    def set_trailing_metadata(self, metadata: Any) -> None:
        return

    def code(self) -> int:
        return 0


def measure(one: Engine) -> dict[str, Measures]:
    """All cases, by name."""
    found: dict[str, Measures] = {}
    with new_pool() as pool:
        steps = Steps(one, pool)
        found |= {f"step of {number}": steps.count(number) for number in STEP_ITEMS}
        found["step of 1 that is large"] = steps.count(1, LARGE_SIDE)
    found["preprocessing of 1"] = count_preprocessing(one.work)
    with new_pool() as pool:
        service = Service(pool)
        found |= {f"Encode of {number}": service.count_encode(number) for number in CALL_ITEMS}
        found["Encode of 1 that is cached"] = service.count_encode(1, repeated=True)
        found["Acquire and Release"] = service.count_read()
    return found
