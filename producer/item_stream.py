"""The items of one EncodeStream: taken as they come, answered as they are ready, bounded on the way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from producer.core import Lease
from producer.wire.pb import encoder_cache_pb2 as pb


class ItemStream:
    """At most `most` items are under way, or answered and not sent. For the event loop."""

    def __init__(
        self, encode: Callable[[int, pb.MediaItem, list[Lease]], Awaitable[pb.ItemOutcome]], most: int, *, idle_s: float
    ) -> None:
        """`idle_s` without a request end the stream, once what is under way is answered."""
        self._encode = encode
        self._idle_s = idle_s
        self.was_idle = False
        self._permits = asyncio.Semaphore(most)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: asyncio.Queue[tuple[pb.EncodeStreamResponse, list[Lease]] | None] = asyncio.Queue()

    async def read(self, requests: AsyncIterator[pb.EncodeStreamRequest]) -> None:
        """Begins each item as it comes; the last answer is followed by None, also where the client broke off."""
        try:
            index = 0
            while (request := await self._next(requests)) is not None:
                await self._permits.acquire()
                task = asyncio.create_task(self._answer(index, request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                index += 1
            await asyncio.gather(*self._tasks)
        finally:
            self._answers.put_nowait(None)

    async def _next(self, requests: AsyncIterator[pb.EncodeStreamRequest]) -> pb.EncodeStreamRequest | None:
        try:
            return await asyncio.wait_for(anext(requests), self._idle_s)
        except StopAsyncIteration:
            return None
        except asyncio.TimeoutError:
            self.was_idle = True
            return None

    async def responses(self) -> AsyncIterator[pb.EncodeStreamResponse]:
        """Answers in the order in which they are ready."""
        while (answer := await self._answers.get()) is not None:
            yield answer[0]
            self._permits.release()

    def abandon(self) -> list[Lease]:
        """Stops what is under way; leases of answers that were not sent."""
        for task in self._tasks:
            task.cancel()
        left = []
        while not self._answers.empty():
            left.append(self._answers.get_nowait())
        return [lease for answer in left if answer is not None for lease in answer[1]]

    async def _answer(self, index: int, request: pb.EncodeStreamRequest) -> None:
        leases: list[Lease] = []
        outcome = await self._encode(index, request.item, leases)
        self._answers.put_nowait((pb.EncodeStreamResponse(id=request.id, outcome=outcome), leases))
