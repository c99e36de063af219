"""Who may have work done: permits, shared encodes, cancellation. Runs on the event loop."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass

from producer.core import DecodedForm, Lease, MediaItem, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import InvalidItemError, NotFoundError, OverloadedError, UnavailableError
from producer.metrics import Metrics
from producer.wire.content_key import content_key
from producer.wire.contract import Reason

_HASH_INLINE_BYTES = 1 << 20
_DECODED = {"image": (3, 1), "video": (4, 1), "audio": (1, 4)}
"""Dimensions and bytes of an element of what a client decoded, by modality."""
_RATES_HZ = {"video": (0.001, 1000.0), "audio": (1000.0, 384_000.0)}
_MAX_FRAMES = 768
_MAX_AUDIO_S = 600
_URL = re.compile(rb"\s*(https?|ftp|file|s3|gs|data):", re.IGNORECASE)


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
        metrics: Metrics,
        also: Callable[[Lease], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare` takes key and item; `submit` hands the prepared item to the device; `also` comes before a reply."""
        self._also = also
        self._pool = pool
        self._prepare = prepare
        self._submit = submit
        self._fingerprint = fingerprint
        self._modalities = modalities
        self._max_queue_items = max_queue_items
        self._max_item_bytes = max_item_bytes
        self._metrics = metrics
        self._works: dict[str, _Work] = {}
        self._closed = False

    async def encode(self, item: MediaItem) -> Lease:
        """A lease on the item's embedding, encoded now if it is not in the pool.

        Raises:
            ServiceError: the one outcome of this item, if it is not a lease.
        """
        self._check(item)
        key = await self._key(item)
        lease = await self._lease(key, item)
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

    async def _lease(self, key: str, item: MediaItem) -> Lease:
        try:
            lease = self._pool.grant(key)
        except NotFoundError:
            await self._join(key, item)
            return self._grant_new(key)
        self._metrics.shared.labels("pool").inc()
        return lease

    def _check(self, item: MediaItem) -> None:
        if item.modality not in self._modalities:
            raise InvalidItemError(
                Reason.UNSUPPORTED_MODALITY, f"modality {item.modality} is not served; {', '.join(self._modalities)} is"
            )
        if not item.data:
            raise InvalidItemError(Reason.MEDIA_EMPTY, "the item has no data")
        if item.decoded is not None:
            _check_decoded(item, item.decoded)
        elif _URL.match(item.data):
            raise InvalidItemError(Reason.MEDIA_REFUSED, "the item is a URL; media arrive as bytes, nothing is fetched")
        if len(item.data) > self._max_item_bytes:
            raise InvalidItemError(
                Reason.MEDIA_TOO_LARGE,
                f"the item has {len(item.data)} bytes; at most {self._max_item_bytes} are allowed",
            )

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

    async def _join(self, key: str, item: MediaItem) -> None:
        """Waits for the encode of `key`, begun here if nobody has."""
        work = self._works.get(key)
        if work is None:
            work = self._begin(key, item)
        else:
            self._metrics.shared.labels("in_flight").inc()
        work.num_waiters += 1
        try:
            await asyncio.wait([work.task])
            if work.task.cancelled():
                raise UnavailableError(Reason.SHUTTING_DOWN, "the service shut down before the item was encoded")
            work.task.result()
        finally:
            work.num_waiters -= 1
            if not work.num_waiters:
                self._forget(key, work)  # at once: nobody may join what is being cancelled
                work.task.cancel()

    def _begin(self, key: str, item: MediaItem) -> _Work:
        if self._closed:
            raise UnavailableError(Reason.SHUTTING_DOWN, "the service is shutting down")
        if len(self._works) >= self._max_queue_items:
            raise OverloadedError(Reason.QUEUE_FULL, f"{self._max_queue_items} items are waiting already")
        work = _Work(asyncio.create_task(self._work(key, item)))
        self._works[key] = work
        self._metrics.queue_items.set(len(self._works))
        work.task.add_done_callback(lambda task: self._end(key, work))
        return work

    async def _work(self, key: str, item: MediaItem) -> None:
        with self._metrics.time("preprocess"):
            prepared = await self._prepare(key, item)
        await asyncio.wrap_future(self._submit(prepared))

    def _end(self, key: str, work: _Work) -> None:
        self._forget(key, work)
        if not work.task.cancelled():
            work.task.exception()  # marks it as seen: its waiters may have left meanwhile

    def _forget(self, key: str, work: _Work) -> None:
        if self._works.get(key) is work:
            del self._works[key]
            self._metrics.queue_items.set(len(self._works))


def _check_decoded(item: MediaItem, form: DecodedForm) -> None:
    """Refuses a form that the bytes do not have, or no device makes, before anything is computed from it."""
    dimensions, element_bytes = _DECODED[item.modality]
    has_form = len(form.shape) == dimensions and (dimensions == 1 or form.shape[-1] == 3)
    if not has_form or math.prod(form.shape) * element_bytes != len(item.data):
        shape = "x".join(map(str, form.shape[:8]))
        raise InvalidItemError(
            Reason.MEDIA_UNREADABLE, f"a decoded {item.modality} of shape {shape} does not have {len(item.data)} bytes"
        )
    if item.modality == "image":
        return
    low, high = _RATES_HZ[item.modality]
    if not low <= form.rate_hz <= high:
        raise InvalidItemError(
            Reason.MEDIA_UNREADABLE, f"rate_hz of the {item.modality} is {form.rate_hz}; allowed are {low} to {high}"
        )
    most = _MAX_FRAMES if item.modality == "video" else int(_MAX_AUDIO_S * form.rate_hz)
    if form.shape[0] > most:
        raise InvalidItemError(
            Reason.MEDIA_TOO_LARGE, f"the {item.modality} has {form.shape[0]} frames or samples; allowed are {most}"
        )
