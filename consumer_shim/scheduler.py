"""The scheduler's side: which requests wait for which embeddings, and when they are ready or unavailable.

An item is ready only while the request pins its block in the landing region. What the engine's own encoder cache may
hold is not relied on, since it can evict within one scheduling pass. All methods are for the scheduler's thread.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from consumer_shim.logs import ShimLogger
from consumer_shim.pairing import RequestItem, pair
from consumer_shim.pull import Failure, Pull, PullState
from consumer_shim.recent import Recent
from consumer_shim.tickets import PullTicket
from producer.memory.block_store import Block, BlockStore, StoreFullError
from producer.wire.block import HEADER_BYTES, EmbeddingShape
from producer.wire.origin import NOBODY, Origin, work_for

logger = ShimLogger(__name__)

_MAX_FAILURES = 1024
_MAX_LEFT = 4096
_IN_BAND = ""
"""Stands for the key of what has none, since it brings its own tensor."""


@dataclass(frozen=True, slots=True)
class Load:
    """An embedding that the workers copy out of the region in this step."""

    load_id: int
    identifier: str
    offset: int  # of the rows, in bytes
    shape: EmbeddingShape


@dataclass(slots=True)
class _Request:
    origin: Origin = NOBODY
    leases: list[str] = field(default_factory=list)
    identifiers: list[str] = field(default_factory=list)
    items: list[tuple[RequestItem, PullTicket]] = field(default_factory=list)
    failure: Failure | None = None
    pins: dict[str, Block] = field(default_factory=dict)  # by key
    waits: dict[str, Pull] = field(default_factory=dict)  # by key
    deadline_s: float | None = None  # while it waits

    def needed(self, computed: int) -> dict[str, PullTicket]:
        return {ticket.key: ticket for item, ticket in self.items if item.end > computed}


@dataclass(slots=True)
class _Use:
    """Who goes by an identifier: requests, and the engine's encoder cache."""

    key: str
    num_requests: int = 0
    in_engine: bool = False


class SchedulerSide:
    """Owns the landing region's blocks and the pulls into them."""

    def __init__(
        self,
        store: BlockStore,
        start: Callable[[Pull], None],
        *,
        addresses: Iterable[str],
        width: Callable[[str], int],
        dtype: str,
        pull_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start` has a pull run on some thread. `width`, by modality, and `dtype` are what the model takes."""
        self._store = store
        self._start = start
        self._addresses = frozenset(addresses)
        self._width = width
        self._dtype = dtype
        self._pull_timeout_s = pull_timeout_s
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._pulls: dict[str, Pull] = {}  # by key, the latest
        self._uses: dict[str, _Use] = {}  # by identifier
        self._load_ids = itertools.count()
        self._new_loads: list[Load] = []
        self._loading: dict[int, Block] = {}
        self._unavailable: set[str] = set()
        self._failures: Recent[str, Failure] = Recent(_MAX_FAILURES)  # by a ticket's lease
        self._left: Recent[str, tuple[PullTicket, Origin]] = Recent(_MAX_LEFT)  # by key

    def is_ready(
        self,
        request_id: str,
        computed: int,
        describe: Callable[[], tuple[Sequence[RequestItem], Sequence[PullTicket]]],
        origin: Callable[[], Origin] = lambda: NOBODY,
    ) -> bool:
        """Whether all embeddings that the request still needs lie in the region, pinned for it; pulls them if not.

        Args:
            request_id: the engine's name of the request.
            computed: prompt positions that need no embedding any more.
            describe: media in prompt order and tickets; asked once a request; ValueError where tickets are malformed.
            origin: whom the request's pulls are for; asked once, too.
        """
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = self._admit(describe, origin())
        elif request.failure is not None:
            return False  # told already
        if request.failure is None:
            request.failure = self._advance(request, computed)
        if request.failure is not None:
            self._give_up(request_id, request)
        return request.failure is None and request.deadline_s is None

    def has(self, identifier: str) -> bool:
        """Whether the item's embedding lies in the region, pinned."""
        use = self._uses.get(identifier)
        return use is not None and self._store.is_pinned(use.key)

    def load(self, identifier: str) -> None:
        """Has the workers copy a ready request's item out of the region; its block is pinned until `loaded`."""
        use = self._uses.get(identifier)
        if use is None:
            return
        use.in_engine = True
        block = self._store.pin(use.key)
        if block is None:
            return  # in-band
        load = Load(next(self._load_ids), identifier, block.offset + HEADER_BYTES, block.info)
        self._new_loads.append(load)
        self._loading[load.load_id] = block

    def take_loads(self, freed_identifiers: Iterable[str]) -> list[Load]:
        """Loads of this step; `freed_identifiers` left the engine's encoder cache."""
        for identifier in freed_identifiers:
            use = self._uses.get(identifier)
            if use is not None:
                use.in_engine = False
                self._forget(identifier, use)
        loads, self._new_loads = self._new_loads, []
        return loads

    def loaded(self, load_ids: Iterable[int]) -> None:
        """The workers have copied these out."""
        for load_id in load_ids:
            self._store.unpin(self._loading.pop(load_id))

    def finish(self, request_id: str) -> None:
        """The request has ended, whichever way."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._unpin(request, request.pins.keys())
        for identifier in request.identifiers:
            use = self._uses[identifier]
            use.num_requests -= 1
            self._forget(identifier, use)
        self._pulls = {key: pull for key, pull in self._pulls.items() if not pull.is_over}

    def take_unavailable(self) -> set[str]:
        """Requests that cannot have their embeddings, each told once."""
        found, self._unavailable = self._unavailable, set()
        return found

    def failure_of(self, lease_id: str) -> Failure | None:
        """Why the request that held this ticket's lease failed; may be asked from any thread."""
        return next(iter(self._failures.find([lease_id])), None)

    def leave_tickets(self, tickets: Sequence[PullTicket], origin: Origin = NOBODY) -> None:
        """Tickets for requests without any whose items go by a ticket's key. From any thread."""
        self._left.put({ticket.key: (ticket, origin) for ticket in tickets})

    def _admit(
        self, describe: Callable[[], tuple[Sequence[RequestItem], Sequence[PullTicket]]], origin: Origin
    ) -> _Request:
        request = _Request(origin)
        try:
            items, tickets = describe()
            if not tickets and (left := self._left.find(item.identifier for item in items)):
                tickets, request.origin = [ticket for ticket, _ in left], left[0][1]
            request.leases = [ticket.lease_id for ticket in tickets]
            for item, ticket in pair(items, tickets):
                if ticket is not None:
                    self._check(item, ticket)
                    request.items.append((item, ticket))
                self._use(item, _IN_BAND if ticket is None else ticket.key).num_requests += 1
                request.identifiers.append(item.identifier)
        except ValueError as error:
            request.failure = Failure(400, str(error))
        return request

    def _check(self, item: RequestItem, ticket: PullTicket) -> None:
        """Compares what the ticket promises with what the request and the model take; ValueError names the first."""
        differences = (
            ("rows", ticket.num_rows, item.num_rows),
            ("elements a row", ticket.width, self._width(item.modality)),
            ("elements of", ticket.dtype, self._dtype),
        )
        for what, found, expected in differences:
            if found != expected:
                raise ValueError(
                    f"the ticket of {item.modality} {item.identifier[:16]} has {what} {found}, expected {expected}"
                )
        if ticket.shape.block_bytes > self._store.num_bytes:
            raise ValueError(
                f"the embedding has {ticket.shape.block_bytes} bytes, region_bytes is {self._store.num_bytes}"
            )
        if ticket.address not in self._addresses:
            raise ValueError(
                f"the ticket names producer {ticket.address[:100]}, which this server is not configured with"
            )

    def _use(self, item: RequestItem, key: str) -> _Use:
        """Under one identifier the engine keeps one embedding; ValueError where that is not the one of `key`."""
        use = self._uses.get(item.identifier) or _Use(key)
        if use.key != key:
            raise ValueError(
                f"{item.modality} {item.identifier[:16]} goes by a uuid that other media use at the moment"
            )
        return self._uses.setdefault(item.identifier, use)

    def _advance(self, request: _Request, computed: int) -> Failure | None:
        needed = request.needed(computed)
        self._unpin(request, request.pins.keys() - needed.keys())
        missing = {}
        for key, ticket in needed.items():
            shape = self._pin(request, key)
            if shape is None:
                missing[key] = ticket
            elif shape != ticket.shape:
                return Failure(400, f"the ticket says {ticket.shape}, the embedding is {shape}")
        if not missing:
            request.deadline_s = None
            return None
        if request.deadline_s is None:
            request.deadline_s = self._clock() + self._pull_timeout_s
        return self._wait(request, missing, request.deadline_s)

    def _wait(self, request: _Request, missing: dict[str, PullTicket], deadline_s: float) -> Failure | None:
        """Joins or starts the pulls of `missing`; a failure of one of them, or of the wait."""
        for key, ticket in missing.items():
            pull = request.waits.get(key)
            if pull is not None and pull.state is PullState.FAILED and pull.ticket.source == ticket.source:
                return pull.failure
        if self._clock() > deadline_s:
            return Failure(504, f"the embeddings did not arrive within {self._pull_timeout_s:.0f} s")
        under_way = {key: self._pulls[key] for key in missing if self._is_under_way(key)}
        new = {key: ticket for key, ticket in missing.items() if key not in under_way}
        try:
            blocks = self._store.reserve_all({key: ticket.shape.block_bytes for key, ticket in new.items()})
        except StoreFullError:
            return None  # until others are done with theirs, or the deadline
        for ticket, block in zip(new.values(), blocks, strict=True):
            under_way[ticket.key] = self._pulls[ticket.key] = pull = Pull(ticket, block, deadline_s, request.origin)
            self._start(pull)
        request.waits.update(under_way)
        return None

    def _is_under_way(self, key: str) -> bool:
        """Whether a pull of `key` is under way, or has brought it since this pass looked."""
        pull = self._pulls.get(key)
        return pull is not None and (not pull.is_over or self._store.lookup(key) is not None)

    def _pin(self, request: _Request, key: str) -> EmbeddingShape | None:
        """Pins the embedding of `key` for the request; its shape, or None where it is not in the region."""
        block = request.pins.get(key) or self._store.pin(key)
        if block is None:
            return None
        request.pins[key] = block
        shape: EmbeddingShape = block.info
        return shape

    def _unpin(self, request: _Request, keys: Iterable[str]) -> None:
        for key in list(keys):
            self._store.unpin(request.pins.pop(key))

    def _give_up(self, request_id: str, request: _Request) -> None:
        assert request.failure is not None
        with work_for(request.origin):
            logger.warning("request %s fails: %s", request_id, request.failure.message)
        self._unpin(request, request.pins.keys())
        self._unavailable.add(request_id)
        self._failures.put(dict.fromkeys(request.leases, request.failure))

    def _forget(self, identifier: str, use: _Use) -> None:
        if not use.num_requests and not use.in_engine:
            self._uses.pop(identifier, None)
