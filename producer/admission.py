"""Who may have work done: permits, deadlines, shared encodes, cancellation. Runs on the event loop.

Every item that comes in leaves with a lease or one error, within its deadline or `item_timeout_s`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from producer.core import Lease, MediaItem, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import DeadlineError, OverloadedError, ServiceError, UnavailableError
from producer.item_checks import ItemChecks
from producer.mailbox import Mailbox
from producer.messages import status_code
from producer.metrics import Metrics
from producer.pace import Pace
from producer.wire.content_key import content_key
from producer.wire.contract import Reason
from producer.wire.origin import current, work_for
from producer.wire.tracing import Tracing, annotate
from producer.work import Work, wake

_HASH_INLINE_BYTES = 1 << 20
_ITEM_BYTES = 1 << 12
"""What an item takes here beside its data; it bounds how many may wait for one encode."""
_RETRY_S = (0.05, 5.0)


class Admission:
    """Lets items in, or refuses them at once. Equal items that are asked for together are encoded once."""

    def __init__(
        self,
        pool: EmbeddingPool,
        prepare: Callable[[str, MediaItem], "Future[PreparedItem]"],
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
        """`prepare` takes key and item; its future may end on any thread, and there `submit` hands what it made to the
        device. `also` comes before a reply.
        """
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
        self._works: dict[str, Work] = {}
        self._mailbox: Mailbox[Work] | None = None
        self._is_idle: asyncio.Future[None] | None = None
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
        num_bytes = self._hold(len(item.data) + _ITEM_BYTES)
        try:
            key = await self._key(item)
            lease = await self._lease(key, item, deadline_s)
        finally:
            self._held_bytes -= num_bytes
        if self._also is not None:
            try:
                await self._also(lease)
            except BaseException:
                self._pool.release(lease.lease_id)
                raise
        return lease

    async def drain(self) -> None:
        """Admits nothing more and waits for the work in hand; what is in hand when this is cancelled is dropped."""
        self._closed = True
        if not self._works:
            return
        self._is_idle = asyncio.get_running_loop().create_future()
        try:
            await self._is_idle
        except asyncio.CancelledError:
            for work in list(self._works.values()):
                work.cancel()
                self._end(work)  # at once, though a step that has begun goes on
            raise

    def _hold(self, num_bytes: int) -> int:
        """Counts what a waiting item keeps in memory, also where another's encode serves it; returns it."""
        if self._held_bytes + num_bytes > self._max_queue_bytes:
            raise self._full(f"{self._held_bytes} bytes are waiting already, at most {self._max_queue_bytes} may")
        self._held_bytes += num_bytes
        return num_bytes

    def _full(self, message: str) -> OverloadedError:
        """The queue has no room; half of what is in hand is done by the time that the client is told to come back."""
        low, high = _RETRY_S
        retry_s = min(max(low, self._pace.seconds_for(len(self._works)) / 2), high)
        return OverloadedError(Reason.QUEUE_FULL, message, retry_s=retry_s)

    async def _lease(self, key: str, item: MediaItem, deadline_s: float) -> Lease:
        lease = self._pool.find(key)
        if lease is not None:
            self._hits.inc()
            self._found.inc()
            annotate(source="pool")
            return lease
        self._misses.inc()
        await self._join(key, item, min(deadline_s, _now_s() + self._item_timeout_s))
        lease = self._pool.find(key)
        if lease is None:
            raise OverloadedError(Reason.POOL_FULL, "the pool is so full that the embedding was evicted at once")
        return lease

    async def _key(self, item: MediaItem) -> str:
        decoded = None if item.decoded is None else (item.decoded.shape, item.decoded.rate_hz)
        if len(item.data) <= _HASH_INLINE_BYTES:
            return content_key(self._fingerprint, item.modality, item.data, decoded)
        return await asyncio.to_thread(content_key, self._fingerprint, item.modality, item.data, decoded)

    async def _join(self, key: str, item: MediaItem, deadline_s: float) -> None:
        """Waits for the encode of `key`, begun here if nobody has."""
        work = self._works.get(key)
        if work is None:
            work = self._begin(key, item, deadline_s)
            annotate(source="encoder")
        else:
            self._joined.inc()
            annotate(source="in_flight")
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(deadline_s, wake, waiter)
        work.waiters.add(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            work.waiters.discard(waiter)
            if not work.waiters and not work.has_ended:
                self._forget(work)  # at once: nobody may join what is being cancelled
                work.cancel()
        if not work.has_ended:
            raise DeadlineError(Reason.DEADLINE_EXCEEDED, "the item was not encoded in time")
        if work.is_cancelled:
            raise UnavailableError(Reason.SHUTTING_DOWN, "the service shut down before the item was encoded")
        if work.error is not None:
            raise work.error

    def _begin(self, key: str, item: MediaItem, deadline_s: float) -> Work:
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
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop, self._end)
        self._works[key] = work = Work(key, self._submit, self._mailbox)
        try:
            self._start(work, item)
        except BaseException:
            self._forget(work)
            raise
        return work

    def _start(self, work: Work, item: MediaItem) -> None:
        if self._tracing is None:
            return work.follow(self._prepare(work.key, item), None, None)
        span = self._tracing.begin("preprocess", modality=item.modality)
        try:
            with work_for(span.origin):
                preparing = self._prepare(work.key, item)
        except BaseException as error:
            span.fail(error=type(error).__name__)
            self._tracing.end(span)
            raise
        work.follow(preparing, span, self._tracing)

    def _end(self, work: Work) -> None:
        """From the mailbox: `work` has ended."""
        self._forget(work)
        if not work.is_cancelled:
            self._pace.finish(_now_s())
        work.wake()

    def _forget(self, work: Work) -> None:
        if self._works.get(work.key) is work:
            del self._works[work.key]
        if self._is_idle is not None and not self._works:
            wake(self._is_idle)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
