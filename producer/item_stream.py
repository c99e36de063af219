"""The items of one EncodeStream: taken as they come, answered as they are ready, bounded on the way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from producer.core import Lease
from producer.wire.pb import encoder_cache_pb2 as pb


class ItemStream:
    """At most `most` items are under way, or answered and not sent. For the event loop."""

    def __init__(
        self, encode: Callable[[int, pb.MediaItem, list[Lease]], Awaitable[pb.ItemOutcome]], most: int
    ) -> None:
        self._encode = encode
        self._permits = asyncio.Semaphore(most)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: asyncio.Queue[tuple[pb.EncodeStreamResponse, list[Lease]] | None] = asyncio.Queue()

    async def read(self, requests: AsyncIterator[pb.EncodeStreamRequest]) -> None:
        """Begins each item as it comes; the last answer is followed by None, also where the client broke off."""
        try:
            index = 0
            async for request in requests:
                await self._permits.acquire()
                task = asyncio.create_task(self._answer(index, request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                index += 1
            await asyncio.gather(*self._tasks)
        finally:
            self._answers.put_nowait(None)

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
