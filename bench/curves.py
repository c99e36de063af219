"""Points of a curve: the real service under one load each, and what it then costs and holds."""

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from bench import ours
from bench.load import Send, Settle, closed
from bench.memory import busy_seconds, cpu_seconds, memory, parent, tree
from consumer_shim.client import CHANNEL_OPTIONS, AsyncProducer
from consumer_shim.dispatch import Dispatch
from consumer_shim.tickets import PullTicket
from producer.memory.region import SharedRegion
from producer.transport.base import BlockDescriptor
from producer.transport.shm import ShmReader
from producer.wire.block import read_block
from producer.wire.contract import GRPC_TRANSPORT, SHM_TRANSPORT, WIRE_VERSION
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheStub
from tests.kit.servers import ProducerServer

Item = TypeVar("Item")
CALL_S = 60.0
LANDING_BYTES = 1 << 20
"""Of each consumer that reads shared memory: more than an embedding here has."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What came of one load."""

    x: float
    throughput: float
    """Items a second."""
    p50_ms: float
    p99_ms: float
    server_cpu_ms: float
    """Of one item, over all processes of the service."""
    client_cpu_ms: float
    memory_mib: float
    """Unique to the processes of the service, after the load."""
    other_cores: float
    """Busy with what is neither the service nor its clients: noise."""


async def point(
    x: float, servers: Sequence[ProducerServer], send: Send[Item], items: Iterator[Item], in_flight: int, number: int
) -> Point:
    """`number` of `items`, so many in flight, after a few that are not measured."""
    await closed(send, [*itertools.islice(items, max(16, in_flight))], in_flight)
    loaded = [*itertools.islice(items, max(number, 4 * in_flight))]
    pids = [pid for server in servers for pid in tree(parent(server.pid))]
    cpu_s, busy_s = cpu_seconds(pids), busy_seconds()
    result = await closed(send, loaded, in_flight)
    cpu_s, busy_s = cpu_seconds(pids) - cpu_s, busy_seconds() - busy_s
    return Point(
        x=x,
        throughput=result.throughput,
        p50_ms=result.p50_s * 1000,
        p99_ms=result.p99_s * 1000,
        server_cpu_ms=cpu_s / len(loaded) * 1000,
        client_cpu_ms=result.client_cpu_s / len(loaded) * 1000,
        memory_mib=sum(one.unique_bytes for one in memory(pids).values()) / MIB,
        other_cores=max(0.0, busy_s - cpu_s - result.client_cpu_s) / result.seconds,
    )


async def quietest(measure: Callable[[], Awaitable[Point]], repeats: int) -> Point:
    """Of several measurements the one that others disturbed least."""
    return min([await measure() for _ in range(repeats)], key=lambda one: one.other_cores)


def encoding(server: ProducerServer) -> AbstractAsyncContextManager[Send[bytes]]:
    """A client that has pictures encoded and gives the leases back."""

    @contextlib.asynccontextmanager
    async def made() -> AsyncIterator[Send[bytes]]:
        async with ours.client(server.address) as send:
            yield lambda image: send(ours.request(image))

    return made()


@contextlib.asynccontextmanager
async def consuming(server: ProducerServer, transport: str, number: int) -> AsyncIterator[Send[bytes]]:
    """`number` consumers, each with a connection of its own, that encode, acquire, read, check and release.

    For loads with as many in flight.
    """
    async with contextlib.AsyncExitStack() as stack:
        consumers = [_Consumer(server.address, transport) for _ in range(number)]
        for one in consumers:
            stack.push_async_callback(one.close)
        idle = deque(consumers)

        async def send(image: bytes) -> Settle:
            consumer = idle.popleft()
            return partial(settle, consumer, await consumer.read(image))

        async def settle(consumer: _Consumer, lease_id: str) -> None:
            await consumer.release(lease_id)
            idle.append(consumer)

        yield send


class _Consumer:
    """One that needs embeddings: its channel, and where they land."""

    def __init__(self, address: str, transport: str) -> None:
        self._address = address
        self._transport = transport
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = EncoderCacheStub(self._channel)
        self._region = SharedRegion.create("ec-bench-landing", LANDING_BYTES)
        self._reader = ShmReader(self._region)

    async def read(self, image: bytes) -> str:
        """Has `image` encoded and reads its embedding, whole and checked; the lease that is still held."""
        item = pb.MediaItem(modality=pb.MODALITY_IMAGE, data=image)
        response = await self._stub.Encode(pb.EncodeRequest(items=[item]), timeout=CALL_S)
        (outcome,) = response.outcomes
        if outcome.WhichOneof("outcome") != "ticket":
            raise RuntimeError(f"the producer refused a picture: {outcome}"[:500])
        expected = PullTicket.from_message(outcome.ticket, self._address)
        acquired = await self._stub.Acquire(
            pb.AcquireRequest(
                key=outcome.ticket.key,
                epoch=outcome.ticket.epoch,
                lease_id=outcome.ticket.lease_id,
                transport=self._transport,
                wire_version=WIRE_VERSION,
            ),
            timeout=CALL_S,
        )
        block = await self._block(acquired)
        read_block(block, expected.identity(acquired.descriptor.generation), expected.shape)
        return str(acquired.lease_id)

    async def release(self, lease_id: str) -> None:
        await self._stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=CALL_S)

    async def close(self) -> None:
        self._reader.close()
        self._region.close()
        await self._channel.close()

    async def _block(self, acquired: pb.AcquireResponse) -> memoryview:
        if self._transport == GRPC_TRANSPORT:
            call = self._stub.Fetch(pb.FetchRequest(lease_id=acquired.lease_id), timeout=CALL_S)
            return memoryview(b"".join([part.data async for part in call]))
        assert self._transport == SHM_TRANSPORT
        found = acquired.descriptor
        block = BlockDescriptor(
            transport=found.transport,
            lease_id=acquired.lease_id,
            address=found.address,
            num_bytes=found.length,
            generation=found.generation,
            peer=found.peer,
            peer_metadata=found.peer_metadata,
        )
        self._reader.read(block, 0, CALL_S)
        return self._region.view[: found.length]


@contextlib.asynccontextmanager
async def dispatching(servers: Sequence[ProducerServer], shares: "Counter[str]") -> AsyncIterator[Send[bytes]]:
    """The shim's way to several producers: each picture goes where its content ranks first; counted in `shares`."""
    producers = [AsyncProducer(server.address) for server in servers]

    async def send(image: bytes) -> Settle:
        item = pb.MediaItem(modality=pb.MODALITY_IMAGE, data=image)
        ((ticket, producer),) = await Dispatch([item], producers, CALL_S, None).run()
        shares[producer.address] += 1
        return partial(producer.release, ticket.lease_id, CALL_S)

    try:
        yield send
    finally:
        for one in producers:
            await one.close()
