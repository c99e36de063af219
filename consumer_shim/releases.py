"""Leases on their way back: those that come while a call is under way go together in the next one."""

import asyncio
from collections.abc import Awaitable, Callable

from producer.wire.contract import MAX_MORE_LEASES
from producer.wire.pb import encoder_cache_pb2 as pb


class Releases:
    """For one producer and one event loop."""

    def __init__(self, send: Callable[[pb.ReleaseRequest, float], Awaitable[None]]) -> None:
        """`send` makes the call, within so many seconds, and does not raise where it fails."""
        self._send = send
        self._waiting: list[str] = []
        self._next: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # held until they are done
        self._is_free = asyncio.Lock()

    async def add(self, lease_id: str, timeout_s: float) -> None:
        """Returns when the call that releases it is over: after `timeout_s` at most, and those of the call before.

        Cancelling it changes nothing.
        """
        self._waiting.append(lease_id)
        if self._next is None:
            self._next = asyncio.create_task(self._call(timeout_s))
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        await asyncio.shield(self._next)

    async def _call(self, timeout_s: float) -> None:
        async with self._is_free:
            taken, self._waiting, self._next = self._waiting, [], None
            for start in range(0, len(taken), MAX_MORE_LEASES):
                first, *more = taken[start : start + MAX_MORE_LEASES]
                await self._send(pb.ReleaseRequest(lease_id=first, lease_ids=more), timeout_s)
