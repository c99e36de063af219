"""Load on one server, from one event loop: so many requests in flight, or arrivals at a rate. Owns no connection.

A `Send` sends what it is given and returns once the answer is there: that is the latency. What it returns, if anything,
is work that the answer entails, such as giving back a lease: it is awaited before the sender goes on, so it counts as
load but not as latency. Whatever either raises ends the measurement, as `LoadError`.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")
Settle = Callable[[], Awaitable[None]]
Send = Callable[[Item], Awaitable[Settle | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a load."""

    seconds: float
    """From the first request until the last one's answer and what it entailed."""
    latencies_s: tuple[float, ...]
    """Of each request, in ascending order."""
    client_cpu_s: float
    """What this process computed meanwhile."""

    def __post_init__(self) -> None:
        if not self.latencies_s:
            raise ValueError("latencies_s is empty; there must be a request")

    @property
    def num_requests(self) -> int:
        return len(self.latencies_s)

    @property
    def throughput(self) -> float:
        """Requests a second."""
        return self.num_requests / self.seconds

    @property
    def p50_s(self) -> float:
        return self.percentile_s(50)

    @property
    def p99_s(self) -> float:
        return self.percentile_s(99)

    def percentile_s(self, percent: float) -> float:
        """The latency that so many requests of a hundred did not exceed."""
        return self.latencies_s[max(0, math.ceil(self.num_requests * percent / 100) - 1)]


async def closed(send: Send[Item], items: Sequence[Item], in_flight: int) -> Result:
    """Sends all `items`, `in_flight` at a time: the next one as soon as one is done with."""
    if in_flight < 1:
        raise ValueError(f"in_flight is {in_flight}; allowed is 1 or more")
    record = _Record()
    waiting = iter(items)

    async def client() -> None:
        for item in waiting:
            await record.request(send, item, time.perf_counter())

    await _all(client() for _ in range(in_flight))
    return record.result()


async def opened(send: Send[Item], items: Sequence[Item], rate: float, *, seed: int, most: int) -> Result:
    """Sends `items` at random moments, `rate` of them a second, whether or not earlier ones were answered.

    At most `most` are under way; one that is due meanwhile waits, and its latency counts from when it was due.
    """
    if not (rate > 0 and most >= 1):
        raise ValueError(f"rate is {rate} and most is {most}; allowed are a rate above 0 and 1 or more")
    record = _Record()
    waiting = zip(items, _arrivals(rate, seed, time.perf_counter()), strict=False)

    async def client() -> None:
        for item, due_s in waiting:
            await asyncio.sleep(due_s - time.perf_counter())
            await record.request(send, item, due_s)

    await _all(client() for _ in range(min(most, len(items))))
    return record.result()


def _arrivals(rate: float, seed: int, start_s: float) -> Iterator[float]:
    """The moments of a Poisson process, without end."""
    draw = random.Random(seed)
    due_s = start_s
    while True:
        due_s += draw.expovariate(rate)
        yield due_s


class LoadError(Exception):
    """A request failed."""


class _Record:
    """What is measured while a load is sent."""

    def __init__(self) -> None:
        self._latencies_s: list[float] = []
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()

    async def request(self, send: Send[Item], item: Item, due_s: float) -> None:
        """
        Raises:
            LoadError: it failed, or what it entailed did.
        """
        try:
            settle = await send(item)
            self._latencies_s.append(time.perf_counter() - due_s)
            if settle is not None:
                await settle()
        except Exception as error:
            raise LoadError(f"request {len(self._latencies_s)} failed: {error!r}"[:500]) from error

    def result(self) -> Result:
        return Result(
            seconds=time.perf_counter() - self._began_s,
            latencies_s=tuple(sorted(self._latencies_s)),
            client_cpu_s=time.process_time() - self._began_cpu_s,
        )


async def _all(clients: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs them to their end; the first one that fails ends all."""
    tasks = [asyncio.ensure_future(client) for client in clients]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
