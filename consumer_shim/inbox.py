"""What a client sends in an ASGI exchange, of which the next message may be waited for before anybody asks for it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

T = TypeVar("T")


class Inbox:
    """The messages of one client, in order; none is lost. At most one is held here. Must be closed."""

    def __init__(self, receive: Receive) -> None:
        """`receive` is the server's."""
        self._receive = receive
        self._next: asyncio.Task[Message] | None = None

    async def take(self) -> Message:
        """The next message."""
        if self._next is None:
            return await self._receive()
        found, self._next = self._next, None
        return await found

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns or raises; None if the client left before it ended, and `work` was cancelled then.

        Any other message than that the client left stays for `take`, and so does that one if it came too late.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.sleep(0)
            if not task.done():  # most work has nothing to wait for
                coming = self._next = self._next or asyncio.create_task(_one(self._receive))
                await asyncio.wait({task, coming}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done() and _is_gone(coming):
                    self._next = None
                    return None
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})  # it gives back what it holds

    async def close(self) -> None:
        """Nobody takes messages any more."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)


async def _one(receive: Receive) -> Message:
    return await receive()


def _is_gone(coming: "asyncio.Task[Message]") -> bool:
    is_there = coming.done() and not coming.cancelled() and coming.exception() is None
    return is_there and coming.result()["type"] == "http.disconnect"
