"""The embedding pool: published embeddings by content key in one registered region, and the leases that pin them.

Bytes enter once, through `put`, and leave through transports or `open_block`. An entry with a lease is never evicted or
rewritten; every lease ends by release or by expiry. Thread-safe.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from producer.core import EmbeddingInfo, Lease
from producer.errors import InvalidItemError, NotFoundError, OverloadedError
from producer.memory.block_store import Block, BlockStore, StoreFullError
from producer.memory.region import SharedRegion
from producer.wire.block import BlockIdentity, invalidate_block, rows_of, seal_block
from producer.wire.contract import Reason
from producer.wire.random_ids import random_id

LEASE_MARGIN_S = 10.0
"""How much longer than its holder knows a lease pins: a read that began in time may still be under way."""


_MOST_EXPIRED = 256
"""Leases whose end one call notices at most: about a millisecond."""


class Room:
    """A block of the pool that is being written. Its holder fills `rows`, from any thread, then commits or aborts.

    As a context manager it is committed at the end, or aborted where the body raises.
    """

    __slots__ = ("_block", "_identity", "_info", "_store", "_view")

    def __init__(
        self, store: BlockStore, block: Block, view: memoryview, identity: BlockIdentity, info: EmbeddingInfo
    ) -> None:
        """`view` is all of `block`."""
        self._store = store
        self._block = block
        self._view = view
        self._identity = identity
        self._info = info

    @property
    def rows(self) -> memoryview:
        """Where the embedding's bytes belong, row-major."""
        return rows_of(self._view, self._info.shape)

    def commit(self) -> None:
        """All rows lie there: the embedding is whole, and visible from now on."""
        seal_block(self._view, self._identity, self._info.shape)
        self._store.commit(self._block, self._info)

    def abort(self) -> None:
        """Gives the room back. Nobody may be writing there any more."""
        self._store.free(self._block)

    def __enter__(self) -> memoryview:
        return self.rows

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            return self.abort()
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise


class EmbeddingPool:
    """Owns the region's blocks and all leases. `epoch` is this process life's, part of every header."""

    def __init__(
        self,
        region: SharedRegion,
        *,
        epoch: int,
        lease_s: float,
        max_leases: int,
        clock: Callable[[], float] = time.monotonic,
        on_expiry: Callable[[Lease], None] = lambda lease: None,
    ) -> None:
        """`on_expiry` is told each lease that ends by its time, on whichever thread notices it."""
        self._region = region
        self._epoch = epoch
        self._lease_s = lease_s
        self._max_leases = max_leases
        self._clock = clock
        self._lock = threading.Lock()
        self._store = BlockStore(region.num_bytes, on_free=lambda block: invalidate_block(self._view(block)))
        self._leases: OrderedDict[str, tuple[Lease, Block]] = OrderedDict()  # all last equally long: oldest ends first
        self._on_expiry = on_expiry
        self.num_granted = 0
        self.num_expired = 0

    @property
    def store(self) -> BlockStore:
        """For counts and sizes only."""
        return self._store

    @property
    def lease_s(self) -> float:
        """Seconds that a lease's holder may count on."""
        return self._lease_s

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def put(self, key: str, info: EmbeddingInfo, rows: memoryview) -> None:
        """Publishes an embedding, whole or not at all; `rows` are its bytes, row-major.

        Raises:
            InvalidItemError, OverloadedError: as for `reserve`.
        """
        room = self.reserve(key, info)
        if room is None:
            return  # an encode that its clients had given up on was finished all the same
        with room as place:
            assert rows.nbytes == place.nbytes, (rows.nbytes, info.shape)
            place[:] = rows

    def reserve(self, key: str, info: EmbeddingInfo) -> "Room | None":
        """Room for an embedding, which nobody sees before it is committed; None where it is in the pool already.

        Raises:
            InvalidItemError: it is larger than the whole pool.
            OverloadedError: everything in the pool is pinned.
        """
        if info.shape.block_bytes > self._store.num_bytes:
            raise InvalidItemError(
                Reason.MEDIA_TOO_LARGE,
                f"its embedding has {info.shape.block_bytes} bytes; the whole pool has {self._store.num_bytes}",
            )
        self.expire()
        if self._store.lookup(key) is not None:
            return None
        block = self._reserve(key, info.shape.block_bytes)
        identity = BlockIdentity(key=bytes.fromhex(key), epoch=self._epoch, generation=block.generation)
        return Room(self._store, block, self._view(block), identity, info)

    def grant(self, key: str, transport: str = "", *, replaces: str = "") -> Lease:
        """A new lease on the embedding of `key`.

        Args:
            key: content key.
            transport: what it will be read with, "" for not at all yet.
            replaces: a lease on the same embedding that ends with this one's beginning, if it has not ended.

        Raises:
            NotFoundError: it is not in the pool.
            OverloadedError: too many leases.
        """
        lease = self.find(key, transport, replaces=replaces)
        if lease is None:
            raise NotFoundError(Reason.NOT_IN_POOL, f"no embedding of key {key[:64]} is in the pool")
        return lease

    def find(self, key: str, transport: str = "", *, replaces: str = "") -> Lease | None:
        """As `grant`; None where the embedding is not in the pool."""
        while self.expire() and len(self._leases) >= self._max_leases:
            pass
        with self._lock:
            old, _ = self._leases.get(replaces, (None, None))
            replaced = old is not None and old.key == key
            if len(self._leases) - replaced >= self._max_leases:
                raise OverloadedError(Reason.TOO_MANY_LEASES, f"{self._max_leases} leases are held already")
            block = self._store.pin(key)
            if block is None:
                return None
            if replaced:
                del self._leases[replaces]
                self._store.unpin(block)
            lease = Lease(
                lease_id=random_id(),
                key=key,
                transport=transport,
                info=block.info,
                offset=block.offset,
                num_bytes=block.num_bytes,
                generation=block.generation,
                expires_at_s=self._clock() + self._lease_s + LEASE_MARGIN_S,
            )
            self._leases[lease.lease_id] = (lease, block)
            self.num_granted += 1
            return lease

    def release(self, lease_id: str) -> Lease | None:
        """Ends a lease and returns it; None where it had ended."""
        with self._lock:
            lease, block = self._leases.pop(lease_id, (None, None))
        if block is not None:
            self._store.unpin(block)
        return lease

    def held_s(self, lease: Lease) -> float:
        """Seconds since the lease was granted."""
        return self._clock() + self._lease_s + LEASE_MARGIN_S - lease.expires_at_s

    def expire(self) -> bool:
        """Ends leases whose time is over, the oldest first and 256 at most; whether there may be more of them.

        So that thousands which end together stop nobody for long: who needs their room asks again.
        """
        now = self._clock()
        for _ in range(_MOST_EXPIRED):
            with self._lock:
                oldest = next(iter(self._leases.values()), None)
                if oldest is None or oldest[0].expires_at_s > now:
                    return False
                del self._leases[oldest[0].lease_id]
                self.num_expired += 1
            self._store.unpin(oldest[1])
            self._on_expiry(oldest[0])
        return True

    @contextmanager
    def open_block(self, lease_id: str) -> Iterator[memoryview]:
        """The whole block of a lease, read-only, pinned while it is open even if the lease ends meanwhile.

        Raises:
            NotFoundError: no such lease.
        """
        self.expire()
        with self._lock:
            lease, _ = self._leases.get(lease_id, (None, None))
            has_ended = lease is None or lease.expires_at_s <= self._clock()
            block = None if lease is None or has_ended else self._store.pin(lease.key)
        if block is None:
            raise NotFoundError(Reason.LEASE_ENDED, f"lease {lease_id[:64]} does not exist or has ended")
        try:
            yield self._view(block).toreadonly()
        finally:
            self._store.unpin(block)

    def _reserve(self, key: str, num_bytes: int) -> Block:
        """A block, for which leases are ended whose time is over if there is no other room."""
        while True:
            try:
                return self._store.reserve(key, num_bytes)
            except StoreFullError as error:
                why = f"the embedding pool is full of leased embeddings: {error}"
            before = self.num_expired
            self.expire()
            if self.num_expired == before:
                raise OverloadedError(Reason.POOL_FULL, why)

    def _view(self, block: Block) -> memoryview:
        return self._region.view[block.offset : block.offset + block.num_bytes]
