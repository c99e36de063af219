"""Leases that are given back at about the same time: which go together, how many, and that none is lost."""

import asyncio
import time
from collections.abc import Callable

import pytest

from consumer_shim import releases
from consumer_shim.releases import Releases
from producer.wire.pb import encoder_cache_pb2 as pb

BOUND_S = 10.0


class Calls:
    """The calls that are made; each ends when it is let go."""

    def __init__(self) -> None:
        self.leases: list[list[str]] = []
        self.timeouts_s: list[float] = []
        self._go = asyncio.Semaphore(0)

    async def send(self, request: pb.ReleaseRequest, timeout_s: float) -> None:
        self.leases.append([request.lease_id, *request.lease_ids])
        self.timeouts_s.append(timeout_s)
        await self._go.acquire()

    def end(self, number: int = 1) -> None:
        for _ in range(number):
            self._go.release()


async def until(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < until_s
        await asyncio.sleep(0)


async def test_one_is_released_at_once() -> None:
    calls = Calls()
    calls.end()
    await Releases(calls.send).add("a", 3.0)
    assert (calls.leases, calls.timeouts_s) == ([["a"]], [3.0])


async def test_those_that_come_together_go_together_and_those_that_come_meanwhile_in_the_next_call() -> None:
    calls = Calls()
    all_of = Releases(calls.send)
    first = [asyncio.create_task(all_of.add(name, 1.0)) for name in "ab"]
    await until(lambda: calls.leases)
    later = [asyncio.create_task(all_of.add(name, 1.0)) for name in "cd"]
    for _ in range(10):
        await asyncio.sleep(0)
    later.append(asyncio.create_task(all_of.add("e", 1.0)))
    assert not any(one.done() for one in first)
    calls.end()
    await asyncio.gather(*first)
    await until(lambda: len(calls.leases) == 2)
    assert not any(one.done() for one in later)
    calls.end()
    await asyncio.gather(*later)
    assert calls.leases == [["a", "b"], ["c", "d", "e"]]


async def test_a_call_takes_so_many_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "MAX_MORE_LEASES", 2)
    calls = Calls()
    calls.end(2)
    all_of = Releases(calls.send)
    await asyncio.wait_for(asyncio.gather(*(all_of.add(name, 1.0) for name in "abc")), BOUND_S)
    assert calls.leases == [["a", "b"], ["c"]]


async def test_who_gives_up_waiting_has_released_all_the_same() -> None:
    calls = Calls()
    all_of = Releases(calls.send)
    tasks = [asyncio.create_task(all_of.add(name, 1.0)) for name in "ab"]
    await until(lambda: calls.leases)
    late = asyncio.create_task(all_of.add("c", 1.0))
    await asyncio.sleep(0)
    for task in (*tasks, late):
        task.cancel()
    await asyncio.gather(*tasks, late, return_exceptions=True)
    calls.end(2)
    await until(lambda: len(calls.leases) == 2)
    assert calls.leases == [["a", "b"], ["c"]]
    await until(lambda: not all_of._tasks)
