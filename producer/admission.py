"""Who may have work done: permits, deadlines, shared encodes, cancellation. Runs on the event loop.

Every item that comes in leaves with a lease or one error, within its deadline or `item_timeout_s`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from producer.core import Lease, MediaItem, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import DeadlineError, NotFoundError, OverloadedError, ServiceError, UnavailableError
from producer.item_checks import ItemChecks
from producer.messages import status_code
from producer.metrics import Metrics
from producer.pace import Pace
from producer.wire.content_key import content_key
from producer.wire.contract import Reason
from producer.wire.origin import current
from producer.wire.tracing import Tracing, annotate, span

_HASH_INLINE_BYTES = 1 << 20
_ITEM_BYTES = 1 << 12
"""What an item takes here beside its data; it bounds how many may wait for one encode."""
_RETRY_S = (0.05, 5.0)


@dataclass(slots=True)
class _Work:
    """An encode under way and how many clients wait for it; it is cancelled when none does."""

    task: "asyncio.Task[None]"
    num_waiters: int = 0


class Admission:
    """Lets items in, or refuses them at once. Equal items that are asked for together are encoded once."""

    def __init__(
        self,
        pool: EmbeddingPool,
        prepare: Callable[[str, MediaItem], Awaitable[PreparedItem]],
        submit: Callable[[PreparedItem], "Future[None]"],
        *,
        fingerprint: str,
        modalities: tuple[str, ...],
        max_queue_items: int,
        max_item_bytes: int,
        max_queue_bytes: int = 1 << 30,
        item_timeout_s: float = 120.0,
        metrics: Metrics,
        also: Callable[[Lease], Awaitable[None]] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`prepare` takes key and item; `submit` hands the prepared item to the device; `also` comes before a reply."""
        self._checks = ItemChecks(modalities=modalities, max_item_bytes=max_item_bytes)
        self._pace = Pace()
        self._also = also
        self._tracing = tracing
        self._pool = pool
        self._prepare = prepare
        self._submit = submit
        self._fingerprint = fingerprint
        self._max_queue_items = max_queue_items
        self._max_queue_bytes = max_queue_bytes
        self._item_timeout_s = item_timeout_s
        self._hits, self._misses = (metrics.pool_lookups.labels(result) for result in ("hit", "miss"))
        self._found, self._joined = (metrics.items_shared.labels(source) for source in ("pool", "in_flight"))
        self._works: dict[str, _Work] = {}
        self._held_bytes = 0
        metrics.queue_items.set_function(lambda: len(self._works))
        metrics.queue_bytes.set_function(lambda: self._held_bytes)
        self._closed = False

    async def encode(self, item: MediaItem, deadline_s: float = math.inf) -> Lease:
        """A lease on the item's embedding, encoded now if it is not in the pool.

        Args:
            item: what to encode.
            deadline_s: when nobody wants it any more, on the event loop's clock.

        Raises:
            ServiceError: the one outcome of this item, if it is not a lease.
        """
        if self._tracing is None or not current().traceparent:  # as with what is encoded to see whether it works
            return await self._encode(item, deadline_s)
        with self._tracing.span("item", modality=item.modality, bytes=len(item.data)) as traced:
            try:
                lease = await self._encode(item, deadline_s)
            except ServiceError as error:
                traced.set(code=status_code(error).name, reason=error.reason.value)
                raise
            traced.set(code="OK", rows=lease.info.shape.num_rows, key=lease.key[:16])
            return lease

    async def _encode(self, item: MediaItem, deadline_s: float) -> Lease:
        if self._closed:
            raise UnavailableError(Reason.SHUTTING_DOWN, "the service is shutting down")
        self._checks.check(item)
        deadline_s = min(deadline_s, _now_s() + self._item_timeout_s)
        with self._hold(len(item.data) + _ITEM_BYTES):
            key = await self._key(item)
            lease = await self._lease(key, item, deadline_s)
        if self._also is not None:
            try:
                await self._also(lease)
            except BaseException:
                self._pool.release(lease.lease_id)
                raise
        return lease

    async def drain(self) -> None:
        """Admits nothing more and waits for the work in hand."""
        self._closed = True
        await asyncio.gather(*(work.task for work in self._works.values()), return_exceptions=True)

    @contextmanager
    def _hold(self, num_bytes: int) -> Iterator[None]:
        """Counts what a waiting item keeps in memory, also where another's encode serves it."""
        if self._held_bytes + num_bytes > self._max_queue_bytes:
            raise self._full(f"{self._held_bytes} bytes are waiting already, at most {self._max_queue_bytes} may")
        self._held_bytes += num_bytes
        try:
            yield
        finally:
            self._held_bytes -= num_bytes

    def _full(self, message: str) -> OverloadedError:
        """The queue has no room; half of what is in hand is done by the time that the client is told to come back."""
        low, high = _RETRY_S
        retry_s = min(max(low, self._pace.seconds_for(len(self._works)) / 2), high)
        return OverloadedError(Reason.QUEUE_FULL, message, retry_s=retry_s)

    async def _lease(self, key: str, item: MediaItem, deadline_s: float) -> Lease:
        try:
            lease = self._pool.grant(key)
        except NotFoundError:
            self._misses.inc()
            await self._join(key, item, deadline_s)
            return self._grant_new(key)
        self._hits.inc()
        self._found.inc()
        annotate(source="pool")
        return lease

    async def _key(self, item: MediaItem) -> str:
        decoded = None if item.decoded is None else (item.decoded.shape, item.decoded.rate_hz)
        if len(item.data) <= _HASH_INLINE_BYTES:
            return content_key(self._fingerprint, item.modality, item.data, decoded)
        return await asyncio.to_thread(content_key, self._fingerprint, item.modality, item.data, decoded)

    def _grant_new(self, key: str) -> Lease:
        try:
            return self._pool.grant(key)
        except NotFoundError:
            raise OverloadedError(
                Reason.POOL_FULL, "the pool is so full that the embedding was evicted at once"
            ) from None

    async def _join(self, key: str, item: MediaItem, deadline_s: float) -> None:
        """Waits for the encode of `key`, begun here if nobody has."""
        work = self._works.get(key)
        if work is None:
            work = self._begin(key, item, deadline_s)
            annotate(source="encoder")
        else:
            self._joined.inc()
            annotate(source="in_flight")
        work.num_waiters += 1
        try:
            await asyncio.wait([work.task], timeout=max(0.0, deadline_s - _now_s()))
            if not work.task.done():
                raise DeadlineError(Reason.DEADLINE_EXCEEDED, "the item was not encoded in time")
            if work.task.cancelled():
                raise UnavailableError(Reason.SHUTTING_DOWN, "the service shut down before the item was encoded")
            work.task.result()
        finally:
            work.num_waiters -= 1
            if not work.num_waiters:
                self._forget(key, work)  # at once: nobody may join what is being cancelled
                work.task.cancel()

    def _begin(self, key: str, item: MediaItem, deadline_s: float) -> _Work:
        if self._closed:
            raise UnavailableError(Reason.SHUTTING_DOWN, "the service is shutting down")
        if len(self._works) >= self._max_queue_items:
            raise self._full(f"{self._max_queue_items} items are waiting already")
        left_s, needed_s = deadline_s - _now_s(), self._pace.seconds_for(len(self._works))
        if left_s <= needed_s:
            raise DeadlineError(
                Reason.DEADLINE_UNMEETABLE,
                f"{max(0.0, left_s):.3f} s are left for the item, those before it take about {needed_s:.3f} s",
            )
        if not self._works:
            self._pace.begin(_now_s())
        work = _Work(asyncio.create_task(self._work(key, item)))
        self._works[key] = work
        work.task.add_done_callback(lambda task: self._end(key, work))
        return work

    async def _work(self, key: str, item: MediaItem) -> None:
        with span(self._tracing, "preprocess", modality=item.modality) as traced:
            prepared = await self._prepare(key, item)
            if traced is not None:
                traced.set(rows=prepared.num_rows, waited_s=round(prepared.waited_s, 6))
        await asyncio.wrap_future(self._submit(prepared))

    def _end(self, key: str, work: _Work) -> None:
        self._forget(key, work)
        if not work.task.cancelled():
            self._pace.finish(_now_s())
            work.task.exception()  # marks it as seen: its waiters may have left meanwhile

    def _forget(self, key: str, work: _Work) -> None:
        if self._works.get(key) is work:
            del self._works[key]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
