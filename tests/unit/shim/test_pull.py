"""One pull: its states, what becomes of its block and lease in every outcome, and memory that is not settled yet."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from consumer_shim.client import Lease, Producer, ProducerError
from consumer_shim.metrics import OUTCOMES
from consumer_shim.pull import Ended, Failure, Pull, Puller, PullState
from consumer_shim.tickets import PullTicket
from producer.memory.block_store import BlockState, BlockStore
from producer.memory.region import SharedRegion
from producer.transport.base import BlockDescriptor, Reader, TransportError
from producer.wire.block import BlockIdentity, write_block

ADDRESS = "producer:1"
GENERATION = 7
TICKET = PullTicket(
    key="ab" * 32,
    modality="image",
    num_rows=4,
    width=8,
    dtype="float32",
    epoch="00000000000000ff",
    lease_id="1" * 32,
    address=ADDRESS,
)
ROWS = bytes(range(128))
QUEUED, ACQUIRING, READING, CHECKING, READY, FAILED = PullState
LEGAL = {
    (QUEUED, ACQUIRING),
    (ACQUIRING, READING),
    (READING, CHECKING),
    (CHECKING, READY),
    *((state, FAILED) for state in (QUEUED, ACQUIRING, READING, CHECKING)),
}
PATHS: dict[PullState, list[PullState]] = {
    QUEUED: [],
    ACQUIRING: [ACQUIRING],
    READING: [ACQUIRING, READING],
    CHECKING: [ACQUIRING, READING, CHECKING],
    READY: [ACQUIRING, READING, CHECKING, READY],
    FAILED: [FAILED],
}


class WatchedPull(Pull):
    """Remembers its moves."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.moves: list[tuple[PullState, PullState]] = []

    def move(self, state: PullState) -> None:
        before = self.state
        super().move(state)
        self.moves.append((before, state))


@dataclass
class FakeProducer:
    """Grants one lease, or refuses it. It has no pool, and does not know when a lease ends."""

    ttl_s: float = 60.0
    num_bytes: int = TICKET.shape.block_bytes
    refusal: Exception | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def acquire(self, **request: Any) -> Lease:
        self.asked.append(request)
        if self.refusal is not None:
            raise self.refusal
        block = BlockDescriptor(
            transport="fake",
            lease_id="lease",
            address=0,
            num_bytes=self.num_bytes,
            generation=GENERATION,
            peer="",
            peer_metadata=b"",
        )
        return Lease(block=block, ttl_s=self.ttl_s)

    def release(self, lease_id: str, timeout_s: float) -> None:
        self.released.append(lease_id)


class FakeReader(Reader):
    """Writes what a test says into the region, at once. It moves nothing over a network, and writes nothing late."""

    name = "fake"

    def __init__(self, region: SharedRegion) -> None:
        self.write: Callable[[memoryview], object] = whole
        self.settled = True
        self.timeouts_s: list[float] = []
        self._region = region

    def read(self, block: BlockDescriptor, offset: int, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)
        self.write(self._region.view[offset : offset + TICKET.shape.block_bytes])

    def is_settled(self, offset: int) -> bool:
        return self.settled

    def close(self) -> None:
        return


def block_with(**changes: Any) -> Callable[[memoryview], None]:
    """A writer of the whole block, but with another identity."""
    identity = BlockIdentity(**({"key": bytes.fromhex(TICKET.key), "epoch": 0xFF, "generation": GENERATION} | changes))
    return lambda block: write_block(block, identity, TICKET.shape, memoryview(ROWS))


def whole(block: memoryview) -> None:
    block_with()(block)


def torn(block: memoryview) -> None:
    whole(block)
    block[200:220] = bytes(20)


def raises(error: Exception) -> Callable[[memoryview], None]:
    def write(block: memoryview) -> None:
        raise error

    return write


class Setting:
    """A puller with its fakes and a real store and region."""

    def __init__(self, region: SharedRegion) -> None:
        self.producer = FakeProducer()
        self.reader = FakeReader(region)
        self.store = BlockStore(region.num_bytes)
        self.ended: list[Ended] = []
        self.puller = Puller(
            region, self.store, self.find_producer, self.find_reader, on_end=lambda ended: self.ended.append(ended)
        )
        self.no_reader: Exception | None = None

    def find_producer(self, address: str) -> Producer:
        assert address == ADDRESS
        return self.producer  # type: ignore[return-value]

    def find_reader(self, address: str) -> Reader:
        assert address == ADDRESS
        if self.no_reader is not None:
            raise self.no_reader
        return self.reader

    def pull(self, timeout_s: float = 60.0) -> WatchedPull:
        block = self.store.reserve(TICKET.key, TICKET.shape.block_bytes)
        pull = WatchedPull(TICKET, block, time.monotonic() + timeout_s)
        self.puller.run(pull)
        return pull


@pytest.fixture
def setting() -> Any:
    with SharedRegion.create("test", 1 << 16) as region:
        yield Setting(region)


# States


def pull_in(state: PullState) -> Pull:
    pull = Pull(TICKET, BlockStore(4096).reserve(TICKET.key, 4096), 0.0)
    for step in PATHS[state]:
        pull.move(step)
    return pull


@pytest.mark.parametrize(("before", "after"), sorted(itertools.product(PullState, repeat=2), key=str))
def test_moves(before: PullState, after: PullState) -> None:
    pull = pull_in(before)
    if (before, after) in LEGAL:
        pull.move(after)
        assert pull.state is after
    else:
        with pytest.raises(AssertionError):
            pull.move(after)
        assert pull.state is before


@pytest.mark.parametrize("state", PullState)
def test_it_is_over_when_nothing_can_follow(state: PullState) -> None:
    assert pull_in(state).is_over == (state in (READY, FAILED))


def test_the_failure_is_there_before_the_state_says_so() -> None:
    seen = []

    class Spy(Pull):
        def move(self, state: PullState) -> None:
            seen.append(self.failure)
            super().move(state)

    failure = Failure(503, "gone")
    Spy(TICKET, BlockStore(4096).reserve(TICKET.key, 4096), 0.0).fail(failure)
    assert seen == [failure]


# Outcomes


def test_what_is_whole_is_committed_and_its_lease_released(setting: Setting) -> None:
    pull = setting.pull()
    assert pull.moves == [(QUEUED, ACQUIRING), (ACQUIRING, READING), (READING, CHECKING), (CHECKING, READY)]
    assert pull.failure is None
    assert pull.block.state is BlockState.READY
    assert setting.store.lookup(TICKET.key) is pull.block
    assert setting.producer.released == ["lease"]
    (ended,) = setting.ended
    assert ended == Ended("ok", "fake", ended.seconds, TICKET.shape.block_bytes)
    assert ended.seconds > 0


def test_it_asks_as_its_ticket_says(setting: Setting) -> None:
    setting.pull(timeout_s=50.0)
    (asked,) = setting.producer.asked
    timeout_s = asked.pop("timeout_s")
    assert 0 < timeout_s <= 50.0
    assert asked == {"key": TICKET.key, "epoch": TICKET.epoch, "lease_id": TICKET.lease_id, "transport": "fake"}


@pytest.mark.parametrize(("timeout_s", "ttl_s"), [(50.0, 60.0), (60.0, 50.0)])
def test_a_read_ends_by_the_deadline_and_within_the_lease(setting: Setting, timeout_s: float, ttl_s: float) -> None:
    setting.producer.ttl_s = ttl_s
    setting.pull(timeout_s)
    (given_s,) = setting.reader.timeouts_s
    assert 0 < given_s <= 50.0


Arrange = Callable[[Setting], object]
REFUSED = ProducerError(grpc.StatusCode.NOT_FOUND, "NOT_IN_POOL", "no such embedding")
LATE = ProducerError(grpc.StatusCode.DEADLINE_EXCEEDED, "", "Deadline Exceeded")


def arrange(
    *,
    write: Callable[[memoryview], object] = whole,
    no_reader: Exception | None = None,
    **producer: Any,
) -> Arrange:
    """What the fakes of a setting do."""

    def apply(setting: Setting) -> None:
        setting.reader.write = write
        setting.no_reader = no_reader
        setting.producer = FakeProducer(**producer)

    return apply


# From the state that it fails in: how, the HTTP status, the sentence.
FREED = [
    pytest.param(
        ACQUIRING,
        arrange(refusal=REFUSED),
        503,
        "producer producer:1 does not give the embedding: NOT_IN_POOL: no such embedding",
        id="refused",
    ),
    pytest.param(ACQUIRING, arrange(refusal=LATE), 504, "DEADLINE_EXCEEDED: Deadline Exceeded", id="no answer"),
    pytest.param(ACQUIRING, arrange(no_reader=REFUSED), 503, "NOT_IN_POOL", id="no transport"),
    pytest.param(
        READING,
        arrange(num_bytes=1),
        502,
        "what was pulled over fake is not the embedding: the block has 1 bytes, expected 320",
        id="other size",
    ),
    pytest.param(
        READING,
        arrange(write=raises(TransportError("the peer has gone"))),
        503,
        "pulling over fake failed: the peer has gone",
        id="transport",
    ),
    pytest.param(CHECKING, arrange(write=lambda block: None), 502, "the block's magic is", id="nothing came"),
    pytest.param(CHECKING, arrange(write=torn), 502, "the checksum differs", id="torn"),
    pytest.param(CHECKING, arrange(write=block_with(key=bytes(32))), 502, "the block's key is", id="other key"),
    pytest.param(CHECKING, arrange(write=block_with(epoch=1)), 502, "the block's epoch is 1", id="other epoch"),
    pytest.param(CHECKING, arrange(write=block_with(generation=8)), 502, "the block's generation is 8", id="rewritten"),
    pytest.param(CHECKING, arrange(ttl_s=0.0), 503, "the lease ended before the read did", id="lease ended"),
]


@pytest.mark.parametrize(("state", "arrange", "http_status", "sentence"), FREED)
def test_what_fails_for_good_frees_its_block(
    setting: Setting, state: PullState, arrange: Arrange, http_status: int, sentence: str
) -> None:
    arrange(setting)
    pull = setting.pull()
    assert pull.moves[-1] == (state, FAILED)
    assert pull.failure is not None
    assert pull.failure.http_status == http_status
    assert sentence in pull.failure.message
    assert pull.block.state is BlockState.FREED
    assert setting.store.used_bytes == 0
    assert setting.producer.released == ([] if state is ACQUIRING else ["lease"])
    outcome = {504: "timed_out", 502: "not_the_embedding"}.get(http_status)
    outcome = outcome or ("refused" if state is ACQUIRING else "unreadable")
    assert setting.ended == [Ended(outcome, "none" if setting.no_reader else "fake", 0.0, 0)]
    assert outcome in OUTCOMES


def test_a_pull_that_fails_by_our_own_mistake_has_failed(setting: Setting) -> None:
    setting.reader.write = raises(KeyError())
    assert setting.pull().failure == Failure(500, "pulling the embedding failed: KeyError")
    assert setting.ended == [Ended("failed", "fake", 0.0, 0)]


def test_without_time_nobody_is_asked(setting: Setting) -> None:
    pull = setting.pull(timeout_s=0.0)
    assert pull.moves[-1] == (ACQUIRING, FAILED)
    assert pull.failure == Failure(504, "no time was left to pull the embedding")
    assert pull.block.state is BlockState.FREED
    assert setting.producer.asked == []


# Memory that may still be written


def test_an_unsettled_read_keeps_its_memory_until_it_ends(setting: Setting) -> None:
    setting.reader.write = raises(TransportError("no end", settled=False))
    setting.reader.settled = False
    pull = setting.pull()
    assert pull.moves[-1] == (READING, FAILED)
    assert pull.failure == Failure(504, "pulling over fake timed out: no end")
    assert setting.producer.released == []  # the producer must not reuse the block either
    for _ in range(2):
        setting.puller.settle()
        assert pull.block.state is BlockState.QUARANTINED
        assert setting.store.used_bytes == 4096
    setting.reader.settled = True
    setting.puller.settle()
    assert pull.block.state is BlockState.FREED
    assert setting.store.used_bytes == 0
    setting.puller.settle()


def test_the_next_pull_does_not_land_in_quarantined_memory(setting: Setting) -> None:
    setting.reader.write = raises(TransportError("no end", settled=False))
    setting.reader.settled = False
    first = setting.pull()
    setting.reader.write = whole
    second = setting.pull()
    assert second.state is READY
    assert second.block.offset != first.block.offset


def test_one_that_settles_does_not_wait_for_another(setting: Setting) -> None:
    setting.reader.write = raises(TransportError("no end", settled=False))
    first, second = setting.pull(), setting.pull()
    setting.reader.is_settled = lambda offset: offset == second.block.offset  # type: ignore[method-assign]
    setting.puller.settle()
    assert (first.block.state, second.block.state) == (BlockState.QUARANTINED, BlockState.FREED)


# Errors of our own, or of a library


@pytest.mark.parametrize(("where", "state"), [("acquire", BlockState.FREED), ("read", BlockState.QUARANTINED)])
def test_any_error_ends_the_pull(setting: Setting, where: str, state: BlockState) -> None:
    """Nobody knows what a library that failed so in a read still writes."""
    error = RuntimeError("out of order")
    arrange(**({"refusal": error} if where == "acquire" else {"write": raises(error)}))(setting)
    pull = setting.pull()
    assert pull.failure == Failure(500, "pulling the embedding failed: RuntimeError")
    assert pull.block.state is state
    setting.puller.settle()
    assert pull.block.state is BlockState.FREED


def test_an_embedding_whose_lease_cannot_be_released_is_there(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def release(lease_id: str, timeout_s: float) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(setting.producer, "release", release)
    pull = setting.pull()
    assert pull.state is PullState.READY
    assert pull.block.state is BlockState.READY


def test_an_error_of_the_transports_choice_ends_the_pull(setting: Setting) -> None:
    setting.no_reader = RuntimeError("out of order")
    pull = setting.pull()
    assert pull.failure == Failure(500, "pulling the embedding failed: RuntimeError")
    setting.puller.settle()
    assert pull.block.state is BlockState.FREED
