"""Several producers behind one client: real gRPC, real admission and pools; one of them stops, another freezes."""

import asyncio
import base64
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from consumer_shim import budget
from consumer_shim.balancer import Health, item_digest, rank
from consumer_shim.budget import RetryBudget
from consumer_shim.client import AsyncProducer
from consumer_shim.gateway import encode_request
from consumer_shim.rewrite import RequestError
from consumer_shim.tickets import PullTicket, from_params
from producer.metrics import Metrics
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.integration.rig import WAIT_S, Rig, bytes_of, eventually, image
from tests.unit.conftest import Clock

FLOOR = 10
AT_ONCE = 24


@pytest.fixture(autouse=True)
def _own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time brings nothing, so that all that is sent again is counted."""
    monkeypatch.setattr(budget, "PROCESS", RetryBudget(floor=FLOOR, window_s=1e9))


class Fleet:
    """Producers, the client's ends of them, and how often each was sent an Encode."""

    def __init__(self) -> None:
        self.rigs: list[Rig] = []
        self.clients: list[AsyncProducer] = []
        self.calls: Counter[str] = Counter()
        self._servers: list[grpc.aio.Server] = []

    @contextlib.asynccontextmanager
    async def running(self, num: int, **options: Any) -> AsyncIterator["Fleet"]:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(num):
                self.rigs.append(await stack.enter_async_context(Rig(listen=self._listen, **options)))
                client = AsyncProducer(self.rigs[-1].address)
                client._stub = Counting(client._stub, self.calls, client.address)
                stack.push_async_callback(client.close)
                self.clients.append(client)
            yield self

    async def kill(self, rig: Rig) -> None:
        """It ends in the middle of its calls, and nobody listens there any more."""
        await self._servers[self.rigs.index(rig)].stop(grace=None)

    def rank(self, data: bytes) -> list[Rig]:
        """The producers in the order in which an image prefers them."""
        by_address = {rig.address: rig for rig in self.rigs}
        return [by_address[client.address] for client in rank(self.clients, item_digest(image(data)))]

    def files(self, rig: Rig, num: int) -> list[bytes]:
        """Images that rank `rig` first."""
        return [data for data in (b"file %d" % number for number in range(1000)) if self.rank(data)[0] is rig][:num]

    async def encode(self, *files: bytes, timeout_s: float = WAIT_S) -> list[PullTicket]:
        """The tickets in the request that vLLM would get."""
        request = chat(*files)
        await encode_request(request, self.clients, timeout_s)
        return from_params(request["ec_transfer_params"])

    def stop_clocks(self) -> Clock:
        """The time by which producers are passed over: it goes on when a test says so."""
        clock = Clock()
        for client in self.clients:
            client.health = Health(clock=clock)
        return clock

    @property
    def num_leases(self) -> list[int]:
        return [rig.pool.num_leases for rig in self.rigs]

    def _listen(self, metrics: Metrics) -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server()
        self._servers.append(server)
        return server, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"


class Counting:
    """The stub of a client, whose calls are counted by address."""

    def __init__(self, stub: Any, calls: Counter[str], address: str) -> None:
        self._stub, self._calls, self._address = stub, calls, address
        self.Release = stub.Release

    def Encode(self, *arguments: Any, **options: Any) -> Any:
        self._calls[self._address] += 1
        return self._stub.Encode(*arguments, **options)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet().running(3, max_leases=1000) as fleet:
        yield fleet


def chat(*files: bytes) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in files]
    return {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]
    }


async def load(fleet: Fleet, files: Sequence[bytes], *, at_once: int = AT_ONCE) -> list[PullTicket | RequestError]:
    """One request a file, `at_once` of them under way."""
    gate = asyncio.Semaphore(at_once)

    async def one(data: bytes) -> PullTicket | RequestError:
        async with gate:
            try:
                (ticket,) = await fleet.encode(data)
            except RequestError as error:
                return error
            return ticket

    return await asyncio.gather(*map(one, files))


async def test_a_repeated_image_is_encoded_once_in_the_fleet(fleet: Fleet) -> None:
    files = [b"file %d" % (number % 10) for number in range(60)]
    tickets = await load(fleet, files)
    assert [isinstance(one, PullTicket) and one.address for one in tickets] == [
        fleet.rank(one)[0].address for one in files
    ]
    assert sum(len(step) for rig in fleet.rigs for step in rig.device.steps) == 10


async def test_tickets_of_one_request_are_pulled_from_their_own_producers(fleet: Fleet) -> None:
    files = [fleet.files(rig, 1)[0] for rig in fleet.rigs]
    tickets = await fleet.encode(*files)
    assert [ticket.address for ticket in tickets] == [rig.address for rig in fleet.rigs]
    for rig, ticket, data in zip(fleet.rigs, tickets, files, strict=True):
        message = pb.Ticket(
            **{name: getattr(ticket, name) for name in ("key", "epoch", "lease_id", "num_rows", "width")}
        )
        message.dtype, message.modality = ticket.dtype, pb.MODALITY_IMAGE
        assert await rig.fetch(message) == bytes_of(data)
    assert fleet.num_leases == [0, 0, 0]


async def test_a_bad_item_gives_back_what_others_hold_elsewhere(fleet: Fleet) -> None:
    one, two, _ = (fleet.files(rig, 1)[0] for rig in fleet.rigs)
    bad = next(data for data in (b"bad %d" % number for number in range(100)) if fleet.rank(data)[0] is fleet.rigs[2])
    with pytest.raises(RequestError, match="image 3 of 3: the image cannot be decoded") as refused:
        await fleet.encode(one, two, bad)
    assert refused.value.status == 400
    await eventually(lambda: fleet.num_leases == [0, 0, 0])


async def test_when_one_dies_all_are_served_and_nothing_storms(fleet: Fleet) -> None:
    """It dies with calls under way; only its own items go elsewhere, and each of them costs at most one more call."""
    files = [b"file %d" % number for number in range(400)]
    dead = fleet.rigs[0]
    dead.device.gate.clear()
    loading = asyncio.create_task(load(fleet, files))
    await eventually(lambda: len(dead.items) >= 8)
    await fleet.kill(dead)
    dead.device.gate.set()
    found = await loading
    assert [one for one in found if isinstance(one, RequestError)] == []
    expected = [next(rig for rig in fleet.rank(data) if rig is not dead).address for data in files]
    assert [one.address for one in found if isinstance(one, PullTicket)] == expected
    assert fleet.calls.total() <= 1.2 * len(files) + FLOOR
    assert fleet.calls[dead.address] <= AT_ONCE + 8  # those under way, and probes


async def test_when_all_die_every_request_is_told_and_nothing_storms(fleet: Fleet) -> None:
    for rig in fleet.rigs:
        await fleet.kill(rig)
    found = await load(fleet, [b"file %d" % number for number in range(200)])
    assert {one.status for one in found if isinstance(one, RequestError)} == {503}
    assert len(found) == 200
    assert fleet.calls.total() <= 1.2 * 200 + FLOOR


async def test_one_that_is_full_sends_the_rest_on_and_stays() -> None:
    async with Fleet().running(2, max_queue_items=1) as fleet:
        full, other = fleet.rigs
        files = fleet.files(full, 3)
        full.device.gate.clear()
        first = asyncio.create_task(fleet.encode(files[0]))
        await eventually(lambda: full.device.steps)
        assert [one.address for one in await fleet.encode(files[1])] == [other.address]
        full.device.gate.set()
        assert [one.address for one in await first] == [full.address]
        assert [one.address for one in await fleet.encode(files[2])] == [full.address]


async def test_one_that_freezes_is_passed_over_before_anyone_waits_long(fleet: Fleet) -> None:
    """Its device hangs: it takes calls and answers none. Requests that came before end by their deadline."""
    frozen, clock = fleet.rigs[0], fleet.stop_clocks()
    files = fleet.files(frozen, 12)
    frozen.device.gate.clear()
    stuck = asyncio.create_task(load(fleet, files[:1]))
    await eventually(lambda: frozen.device.steps)
    clock.now_s += 10.1
    probe = asyncio.create_task(fleet.encode(files[1], timeout_s=2.0))
    await eventually(lambda: len(frozen.items) == 2)
    for data in files[2:]:
        (ticket,) = await fleet.encode(data, timeout_s=2.0)
        assert ticket.address != frozen.address
    assert [one.address for one in await probe] == [fleet.rank(files[1])[1].address]  # which it was sent on to in time
    assert len(frozen.items) == 2
    frozen.device.gate.set()
    (found,) = await stuck
    assert isinstance(found, PullTicket)
    (ticket,) = await fleet.encode(files[2])
    assert ticket.address == frozen.address  # it has answered: its items are its own again


async def test_a_deadline_without_an_answer_is_remembered(fleet: Fleet) -> None:
    frozen = fleet.rigs[0]
    fleet.stop_clocks()
    files = fleet.files(frozen, 6)
    frozen.device.gate.clear()
    with pytest.raises(RequestError) as refused:
        await fleet.encode(files[0], timeout_s=0.3)
    assert refused.value.status == 504
    for data in files[1:]:
        assert [one.address for one in await fleet.encode(data)] == [fleet.rank(data)[1].address]
    assert len(frozen.items) == 1


async def test_who_leaves_frees_every_producer(fleet: Fleet) -> None:
    """Permits, slots and leases, also of what was done already.

    Not of a ticket that is on its way at that very moment: its lease ends by expiry. So this waits for those to arrive.
    """
    files = [fleet.files(rig, 1)[0] for rig in fleet.rigs]
    fleet.rigs[0].device.gate.clear()
    task = asyncio.create_task(fleet.encode(*files))
    await eventually(
        lambda: fleet.rigs[0].device.steps and [len(one.health._calls) for one in fleet.clients] == [1, 0, 0]
    )
    assert fleet.num_leases == [0, 1, 1]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: fleet.num_leases == [0, 0, 0])
    await eventually(lambda: fleet.rigs[0].sample("queue_items") == 0)


async def test_a_message_too_large_for_one_is_sent_nowhere_else(fleet: Fleet) -> None:
    """gRPC itself refuses more than 4 MiB here, without a reason of ours."""
    with pytest.raises(RequestError, match="larger than max") as refused:
        await fleet.encode(b"x" * (5 << 20))
    assert refused.value.status == 413
    assert fleet.calls.total() == 1
