"""One pull as a state machine: acquire the lease, read the block, check it, release. Runs on a thread of its own."""

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

import grpc

from consumer_shim.client import Lease, Producer, ProducerError
from consumer_shim.logs import ShimLogger
from consumer_shim.tickets import PullTicket
from producer.memory.block_store import Block, BlockState, BlockStore
from producer.memory.region import SharedRegion
from producer.transport.base import Reader, TransportError
from producer.wire.block import BlockError, read_block
from producer.wire.origin import NOBODY, Origin, work_for
from producer.wire.tracing import Tracing, annotate, span

logger = ShimLogger(__name__)

_RELEASE_TIMEOUT_S = 2.0


class PullState(enum.Enum):
    """Where a pull is. What may follow what is in `_MOVES`."""

    QUEUED = "queued"
    ACQUIRING = "acquiring"
    READING = "reading"
    CHECKING = "checking"
    READY = "ready"
    FAILED = "failed"


_MOVES = {
    PullState.QUEUED: {PullState.ACQUIRING, PullState.FAILED},
    PullState.ACQUIRING: {PullState.READING, PullState.FAILED},
    PullState.READING: {PullState.CHECKING, PullState.FAILED},
    PullState.CHECKING: {PullState.READY, PullState.FAILED},
    PullState.READY: set(),
    PullState.FAILED: set(),
}
_OUTCOMES: dict[int, str] = {HTTPStatus.GATEWAY_TIMEOUT: "timed_out", HTTPStatus.BAD_GATEWAY: "not_the_embedding"}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request cannot have its embedding: an HTTP status and a sentence for its sender."""

    http_status: int
    message: str


class Ended(NamedTuple):
    """A pull that is over, for the metrics."""

    outcome: str  # of `consumer_shim.metrics.OUTCOMES`
    transport: str  # "none" where it had come to none
    seconds: float  # from its begin on a thread until the embedding was there
    num_bytes: int  # of the block


class Pull:
    """A pull of `ticket` into `block`. Its worker thread moves it; the scheduler only looks."""

    def __init__(self, ticket: PullTicket, block: Block, deadline_s: float, origin: Origin = NOBODY) -> None:
        """Must end by `deadline_s` (time.monotonic). `origin` is the request that it was begun for."""
        self.ticket = ticket
        self.origin = origin
        self.block = block
        self.deadline_s = deadline_s
        self.state = PullState.QUEUED
        self.transport = "none"
        self.failed_in: PullState | None = None
        self.failure: Failure | None = None

    @property
    def is_over(self) -> bool:
        return self.state in (PullState.READY, PullState.FAILED)

    def move(self, state: PullState) -> None:
        """Goes on to `state`; an illegal move is our own mistake."""
        assert state in _MOVES[self.state], (self.state, state)
        self.state = state

    def fail(self, failure: Failure) -> None:
        """Ends without the embedding. The failure is set before the state that announces it."""
        self.failure, self.failed_in = failure, self.state
        self.move(PullState.FAILED)

    @property
    def outcome(self) -> str:
        """How it ended, in one word."""
        if self.failure is None:
            return "ok"
        if self.failure.http_status == HTTPStatus.SERVICE_UNAVAILABLE:
            return "unreadable" if self.failed_in in (PullState.READING, PullState.CHECKING) else "refused"
        return _OUTCOMES.get(self.failure.http_status, "failed")


class Puller:
    """Runs pulls into one landing region. `run` may be called from several threads."""

    def __init__(
        self,
        region: SharedRegion,
        store: BlockStore,
        producer: Callable[[str], Producer],
        reader: Callable[[str], Reader],
        tracing: Tracing | None = None,
        on_end: Callable[[Ended], None] = lambda ended: None,
    ) -> None:
        """`producer` and `reader` give the client and the transport for an address; `reader` may ask the producer.

        `on_end` is told each pull once, on its thread.
        """
        self._region = region
        self._store = store
        self._producer = producer
        self._reader = reader
        self._tracing = tracing
        self._on_end = on_end
        self._unsettled: deque[tuple[Block, Reader]] = deque()

    def run(self, pull: Pull) -> None:
        """Takes `pull` to its end, whatever happens; its block is committed, freed or quarantined by then."""
        ticket = pull.ticket
        with (
            work_for(pull.origin),
            span(self._tracing, "pull", modality=ticket.modality, rows=ticket.num_rows, key=ticket.key[:16]) as traced,
        ):
            self._take(pull)
            if traced is not None and pull.failure is not None:
                traced.fail(code=pull.failure.http_status)

    def _take(self, pull: Pull) -> None:
        try:
            failure = self._run(pull)
        except Exception as error:  # a pull must end, whatever a library does
            logger.exception("a pull failed")
            if pull.is_over:
                return  # the embedding is there; only its lease was not released
            failure = Failure(500, f"pulling the embedding failed: {type(error).__name__}")
            if pull.block.state is BlockState.WRITING:
                self._store.free(pull.block)
        if failure is not None:
            logger.warning("no embedding %s from %s: %s", pull.ticket.key[:16], pull.ticket.address, failure.message)
            pull.fail(failure)
            self._on_end(Ended(pull.outcome, pull.transport, 0.0, 0))

    def settle(self) -> None:
        """Frees quarantined memory that nothing can write to any more. For one thread at a time."""
        for _ in range(len(self._unsettled)):
            block, reader = self._unsettled.popleft()
            if reader.is_settled(block.offset):
                self._store.free(block)
            else:
                self._unsettled.append((block, reader))

    def _run(self, pull: Pull) -> Failure | None:
        """The steps; None when the block is whole. On failure the block is freed or quarantined already."""
        started_s = time.monotonic()
        left_s = pull.deadline_s - started_s
        pull.move(PullState.ACQUIRING)
        if left_s <= 0:
            return self._give_up(pull, Failure(504, "no time was left to pull the embedding"))
        ticket = pull.ticket
        producer = self._producer(ticket.address)
        try:
            reader = self._reader(ticket.address)
            pull.transport = reader.name
            lease = producer.acquire(
                key=ticket.key, epoch=ticket.epoch, lease_id=ticket.lease_id, transport=reader.name, timeout_s=left_s
            )
        except ProducerError as error:
            return self._give_up(pull, _lost(ticket, error))
        pull.move(PullState.READING)
        return self._read(pull, producer, reader, lease, started_s)

    def _read(self, pull: Pull, producer: Producer, reader: Reader, lease: Lease, started_s: float) -> Failure | None:
        lease_end_s = started_s + lease.ttl_s
        try:
            if lease.block.num_bytes != pull.block.num_bytes:
                raise BlockError(f"the block has {lease.block.num_bytes} bytes, expected {pull.block.num_bytes}")
            annotate(transport=reader.name, bytes=lease.block.num_bytes)
            with span(self._tracing, "read", transport=reader.name):
                reader.read(lease.block, pull.block.offset, min(pull.deadline_s, lease_end_s) - time.monotonic())
            pull.move(PullState.CHECKING)
            read_block(self._view(pull.block), pull.ticket.identity(lease.block.generation), pull.ticket.shape)
            if time.monotonic() > lease_end_s:
                raise TransportError("the lease ended before the read did")
        except TransportError as error:
            what, status = ("timed out", 504) if error.timed_out or not error.settled else ("failed", 503)
            failure = Failure(status, f"pulling over {reader.name} {what}: {error}")
            if not error.settled:
                self._quarantine(pull.block, reader)  # the lease ends by expiry: the read may still be under way
                return failure
            producer.release(lease.block.lease_id, _RELEASE_TIMEOUT_S)
            return self._give_up(pull, failure)
        except BlockError as error:
            producer.release(lease.block.lease_id, _RELEASE_TIMEOUT_S)
            return self._give_up(
                pull, Failure(502, f"what was pulled over {reader.name} is not the embedding: {error}")
            )
        except Exception:
            self._quarantine(pull.block, reader)  # nobody knows what the library still does
            raise
        self._store.commit(pull.block, pull.ticket.shape)
        pull.move(PullState.READY)
        seconds = time.monotonic() - started_s
        self._on_end(Ended(pull.outcome, pull.transport, seconds, pull.block.num_bytes))
        producer.release(lease.block.lease_id, _RELEASE_TIMEOUT_S)
        return None

    def _give_up(self, pull: Pull, failure: Failure) -> Failure:
        self._store.free(pull.block)
        return failure

    def _quarantine(self, block: Block, reader: Reader) -> None:
        self._store.quarantine(block)
        self._unsettled.append((block, reader))

    def _view(self, block: Block) -> memoryview:
        return self._region.view[block.offset : block.offset + block.num_bytes]


def _lost(ticket: PullTicket, error: ProducerError) -> Failure:
    status = 504 if error.code is grpc.StatusCode.DEADLINE_EXCEEDED else 503
    return Failure(
        status, f"producer {ticket.address} does not give the embedding: {error.reason or error.code.name}: {error}"
    )
