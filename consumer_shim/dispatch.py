"""The items of one request on their way to the producers, and their tickets on the way back.

Each item goes to the producer that it ranks first, together with the others that do: one call a producer, all at once.
What a producer cannot take goes on to the next one that its item ranks. One deadline holds for all of it.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from consumer_shim import budget
from consumer_shim.balancer import Call, Health, assign, item_digest
from consumer_shim.client import AsyncProducer
from consumer_shim.errors import ProducerError
from consumer_shim.retries import MAX_ATTEMPTS
from producer.wire.pb import encoder_cache_pb2 as pb

_RELEASE_TIMEOUT_S = 2.0
_LEAST_LEFT_S = 0.05
"""With less time than that nothing goes on to another producer."""
_GRACE_S = 1.0
"""What is under way when an item fails may end within it."""
_HASH_INLINE_BYTES = 1 << 18

Tried = tuple[AsyncProducer, ...]
"""The producers that some items had been at, in order."""


class ItemsError(Exception):
    """Not all items are encoded: why, at which producer, and the item at fault (None where a whole call failed)."""

    def __init__(self, error: ProducerError, address: str, place: int | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.address = address
        self.place = place


class Dispatch:
    """One request's items. For the event loop of its producers."""

    def __init__(
        self,
        items: Sequence[pb.MediaItem],
        producers: Sequence[AsyncProducer],
        timeout_s: float,
        settings: Mapping[str, Any] | None,
    ) -> None:
        """`settings` are those that the producers must have."""
        self._items = items
        self._producers = producers
        self._settings = settings
        self._deadline_s = time.monotonic() + timeout_s
        self._digests = [b""] * len(items)
        self._calls: set[asyncio.Task[None]] = set()
        self._found: dict[int, tuple[pb.Ticket, AsyncProducer]] = {}  # by the item's place
        self._is_over = False

    async def run(self) -> list[tuple[pb.Ticket, AsyncProducer]]:
        """Each item's ticket and the producer that gave it, in order.

        However else this ends, no call is under way any more and the leases of all tickets are released.

        Raises:
            ItemsError: for the first item of which it is known that nobody encodes it.
        """
        if len(self._producers) > 1:
            self._digests = await asyncio.gather(*map(_digest, self._items))
        try:
            for producer, places in self._assigned(range(len(self._items)), ()).items():
                self._begin(producer, places, ())
            while self._calls:
                done, _ = await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    self._calls.remove(call)
                    call.result()
        except BaseException as error:
            self._is_over = True
            await self._abandon(_GRACE_S if isinstance(error, ItemsError) else 0.0)
            raise
        return [self._found[place] for place in range(len(self._items))]

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _assigned(self, places: Iterable[int], tried: Tried) -> dict[AsyncProducer, list[int]]:
        return assign(self._digests, places, self._producers, tried)

    def _begin(self, producer: AsyncProducer, places: list[int], tried: Tried) -> None:
        call = producer.health.begin()
        task = asyncio.create_task(self._send(producer, places, tried, call))
        task.add_done_callback(lambda _: producer.health.end(call))  # also where it is cancelled before it runs
        self._calls.add(task)

    async def _send(self, producer: AsyncProducer, places: list[int], tried: Tried, call: Call) -> None:
        """One call, and what follows from it. ItemsError where that is the end of an item."""
        has_next = any(one.health.is_open for one in self._producers if one is not producer and one not in tried)
        whole: ProducerError | None = None
        outcomes: Sequence[pb.Ticket | ProducerError]
        try:
            outcomes = await producer.encode(
                [self._items[place] for place in places],
                self._left_s / 2 if has_next and call.is_probe else self._left_s,
                settings=self._settings,
                most_attempts=1 if has_next else MAX_ATTEMPTS,
                is_again=bool(tried),
            )
        except ProducerError as error:
            whole, outcomes = error, [error] * len(places)
        _judge(producer.health, call, whole, outcomes)
        refused: dict[int, ProducerError] = {}
        for place, outcome in zip(places, outcomes, strict=True):
            if isinstance(outcome, ProducerError):
                refused[place] = outcome
            else:
                self._found[place] = outcome, producer
        self._go_on(refused, (*tried, producer), is_whole=whole is not None)

    def _go_on(self, refused: Mapping[int, ProducerError], tried: Tried, *, is_whole: bool) -> None:
        """Sends items to the next of their producers, if the last of `tried` refused them for itself only."""
        ended = [place for place, error in refused.items() if not error.is_for_others]
        if not ended:
            left = dict(refused)
            is_late = self._is_over or self._left_s < _LEAST_LEFT_S
            for producer, places in self._assigned(() if is_late else refused, tried).items():
                if budget.PROCESS.take():
                    self._begin(producer, places, tried)
                    for place in places:
                        del left[place]
            ended = list(left)
        if ended:
            raise ItemsError(refused[ended[0]], tried[-1].address, None if is_whole else ended[0])

    async def _abandon(self, grace_s: float) -> None:
        """Ends what is under way. A ticket that comes as its call is cancelled keeps its lease until that expires."""
        try:
            if self._calls and grace_s:
                await asyncio.wait(self._calls, timeout=grace_s)
        finally:
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
            await release_each(list(self._found.values()))


async def release_all(producer: AsyncProducer, lease_ids: Iterable[str]) -> None:
    """Ends leases that nobody will use, as far as the producer can be reached soon."""
    await asyncio.gather(*(producer.release(lease_id, _RELEASE_TIMEOUT_S) for lease_id in lease_ids))


async def release_each(found: Iterable[tuple[pb.Ticket, AsyncProducer]]) -> None:
    """Ends the leases of tickets, each at the producer that gave it."""
    await asyncio.gather(*(release_all(producer, [ticket.lease_id]) for ticket, producer in found))


def _judge(
    health: Health, call: Call, whole: ProducerError | None, outcomes: Iterable[pb.Ticket | ProducerError]
) -> None:
    """What the end of a call says of its producer."""
    errors = (one for one in outcomes if isinstance(one, ProducerError) and (one.is_down or one.is_silence))
    error = whole or next(errors, None)
    if error is None:
        health.answered()
    else:
        health.failed(call, error)


async def _digest(item: pb.MediaItem) -> bytes:
    if len(item.data) + len(item.decoded.data) <= _HASH_INLINE_BYTES:
        return item_digest(item)
    return await asyncio.to_thread(item_digest, item)
