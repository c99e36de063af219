"""A producer in this process: real server, admission, step loop, publisher and pool, behind a real gRPC port.

What it does not reproduce: vLLM. An "image" is any bytes, its rows are its bytes, and the encoder multiplies them; what
begins with `bad` cannot be decoded; so with other modalities, and with what a client decoded. Preprocessing takes no
process, the clock of leases moves when a test says so.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import torch
from typing_extensions import Self

from consumer_shim.channel import PLAIN, ChannelSecurity, aio_channel
from consumer_shim.client import Producer, ProducerError
from producer.admission import Admission
from producer.calls import CallRecorder
from producer.core import MediaItem, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import InternalError, InvalidItemError
from producer.memory.region import SharedRegion
from producer.metrics import Metrics
from producer.publisher import Publisher
from producer.recent_errors import RecentErrors
from producer.server import Servicer
from producer.step_loop import StepLoop
from producer.transport.base import Endpoint, Outlet, TransportError
from producer.transport.stream import StreamOutlet
from producer.wire.contract import WIRE_VERSION, Reason
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheStub, add_EncoderCacheServicer_to_server
from producer.wire.tracing import Tracing
from tests.kit.samples import total
from tests.kit.steps import Done, on_this_loop

WIDTH = 64
FINGERPRINT = "f" * 64
EPOCH = 0xABCDEF
MAX_ITEMS = 8
MAX_ITEM_BYTES = 1 << 16
MAX_REQUEST_BYTES = 4 * MAX_ITEM_BYTES
MAX_BATCH_ROWS = 1 << 17
SETTINGS = {"mm_processor_kwargs": {"size": {"a": 1, "b": [2, 0.5]}, "name": "ü"}, "media_io_kwargs": {}}
WAIT_S = 60.0
"""Longer than anything here takes: reaching it means that it never comes."""


def embedding_of(data: bytes) -> torch.Tensor:
    """Rows as many as bytes, `WIDTH` float32 elements each."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).float()[:, None] * torch.arange(1, WIDTH + 1)


def bytes_of(data: bytes) -> bytes:
    return embedding_of(data).numpy().tobytes()


class Device:
    """The encoder. Steps wait while the gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.steps: list[list[bytes]] = []

    def launch(self, items: Sequence[PreparedItem]) -> Done:
        self.steps.append([item.inputs for item in items])
        assert self.gate.wait(WAIT_S)
        refusal = InternalError(Reason.NON_FINITE_OUTPUT, "the embedding holds NaN or infinity")
        return Done([refusal if item.inputs == b"not finite" else embedding_of(item.inputs) for item in items])


class BrokenOutlet(Outlet):
    """A transport that never works. Either it says so, or it goes down when it is needed."""

    def __init__(self, name: str, *, is_up: bool) -> None:
        self.name = name
        self._is_up = is_up

    def describe(self) -> Endpoint:
        raise TransportError("its agent is being started again")

    @property
    def is_up(self) -> bool:
        return self._is_up

    def close(self) -> None:
        return


def _listen(metrics: Metrics) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(interceptors=[CallRecorder(metrics)])
    return server, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"


class Rig:
    """The producer and its clients; as an async context manager, up inside it."""

    def __init__(
        self,
        *,
        pool_bytes: int = 1 << 20,
        max_leases: int = 100,
        max_queue_items: int = 64,
        max_queue_bytes: int = 1 << 30,
        max_streams: int = 4,
        stream_idle_s: float = 60.0,
        lease_s: float = 60.0,
        modalities: tuple[str, ...] = ("image",),
        max_client_items: int = 0,
        security: ChannelSecurity = PLAIN,
        listen: Callable[[Metrics], tuple[grpc.aio.Server, str]] = _listen,
        tracing: Tracing | None = None,
    ) -> None:
        """`security` is its clients'; `listen` makes a server that has its port, with the address for tickets."""
        self.now_s = 0.0
        self.items: list[MediaItem] = []
        """What came to preprocessing."""
        self.metrics = Metrics()
        self.errors = RecentErrors()
        self.device = Device()
        self._max_client_items = max_client_items
        self._security = security
        self._listen = listen
        self._streams = {"max_streams": max_streams, "stream_idle_s": stream_idle_s}
        self._stack = AsyncExitStack()
        region = self._stack.enter_context(SharedRegion.create("ec-producer-test", pool_bytes))
        self.pool = EmbeddingPool(
            region,
            epoch=EPOCH,
            lease_s=lease_s,
            max_leases=max_leases,
            clock=lambda: self.now_s,
            on_expiry=self.metrics.count_expiry,
        )
        self.loop = StepLoop(
            self.device.launch,
            Publisher(self.pool).publish,
            max_rows=MAX_BATCH_ROWS,
            max_items=4,
            metrics=self.metrics,
            tracing=tracing,
        )
        self.admission = Admission(
            self.pool,
            on_this_loop(self._prepare),
            self.loop.submit,
            fingerprint=FINGERPRINT,
            modalities=modalities,
            max_queue_items=max_queue_items,
            max_item_bytes=MAX_ITEM_BYTES,
            max_queue_bytes=max_queue_bytes,
            metrics=self.metrics,
            tracing=tracing,
        )

    async def __aenter__(self) -> Self:
        self.loop.start()
        self._stack.callback(self.loop.stop)
        server, self.address = self._listen(self.metrics)
        self.info = _info(self.address)
        self.info.limits.max_client_items = self._max_client_items
        outlets: list[Outlet] = [StreamOutlet(), BrokenOutlet("down", is_up=False), BrokenOutlet("falling", is_up=True)]
        offered = {outlet.name: outlet for outlet in outlets}
        servicer = Servicer(
            self.admission,
            self.pool,
            offered,
            self.info,
            self.metrics,
            settings=SETTINGS,
            errors=self.errors,
            **self._streams,
        )
        add_EncoderCacheServicer_to_server(servicer, server)
        await server.start()
        self._stack.push_async_callback(server.stop, 0)
        self.client = Producer(self.address, security=self._security)
        self._stack.callback(self.client.close)
        self.channel = aio_channel(self.address, self._security, ())
        self._stack.push_async_callback(self.channel.close)
        self.stub: Any = EncoderCacheStub(self.channel)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.device.gate.set()
        await self._stack.aclose()

    async def encode(self, *files: bytes, timeout_s: float = WAIT_S) -> list[pb.Ticket | ProducerError]:
        """One outcome a file, through the shim's client."""
        return await asyncio.to_thread(self.client.encode, [image(data) for data in files], timeout_s)

    async def ticket(self, data: bytes) -> pb.Ticket:
        """The ticket of a file that is fine."""
        (outcome,) = await self.encode(data)
        assert isinstance(outcome, pb.Ticket), outcome
        return outcome

    async def fetch(self, ticket: pb.Ticket) -> bytes:
        """The rows, checked: acquire, fetch and release, through the shim's client."""
        return await asyncio.to_thread(self.client.fetch, ticket, WAIT_S)

    def begin(self, *files: bytes, timeout_s: float = WAIT_S) -> Any:
        """An Encode call that the test can wait for or cancel."""
        return self.stub.Encode(pb.EncodeRequest(items=[image(data) for data in files]), timeout=timeout_s)

    async def begin_step(self, data: bytes) -> Any:
        """An Encode call whose item is on the device, and stays there until the gate opens."""
        self.device.gate.clear()
        call = self.begin(data)
        await eventually(lambda: [data] in self.device.steps)
        return call

    def sample(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, 0 where it was never touched."""
        return total(self.metrics.registry, name, **labels)

    async def _prepare(self, key: str, item: MediaItem) -> PreparedItem:
        self.items.append(item)
        if item.data.startswith(b"bad"):
            raise InvalidItemError(Reason.MEDIA_UNREADABLE, f"the {item.modality} cannot be decoded")
        if item.data.startswith(b"unforeseen"):
            raise RuntimeError("a mistake of ours")
        kind = f"{item.modality}_embeds"
        part = {"type": kind, kind: {f"{item.modality}_grid_thw": [1, 1, len(item.data)]}}
        return PreparedItem(
            key=key, modality=item.modality, num_rows=len(item.data), content_part=part, inputs=item.data
        )


def image(data: bytes) -> pb.MediaItem:
    return pb.MediaItem(modality=pb.MODALITY_IMAGE, data=data)


async def eventually(condition: Callable[[], object]) -> None:
    """Waits until `condition` holds."""
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


def _info(address: str) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(
        model="tiny",
        fingerprint=FINGERPRINT,
        dtype="float32",
        modalities=[pb.ModalityInfo(modality=pb.MODALITY_IMAGE, width=WIDTH)],
        limits=pb.Limits(
            max_items_per_request=MAX_ITEMS, max_item_bytes=MAX_ITEM_BYTES, max_request_bytes=MAX_REQUEST_BYTES
        ),
        transports=["down", "falling", "grpc"],
        epoch=f"{EPOCH:016x}",
        wire_version=WIRE_VERSION,
        address=address,
    )
