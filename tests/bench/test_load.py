"""The load loops, on senders that need no server and a clock that only they move."""

import asyncio
from itertools import islice, pairwise

import pytest

from bench import load
from bench.load import LoadError, Result, Settle, closed, opened


class Clock:
    """In the place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.now_s / 10


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(load, "time", clock)
    return clock


class Sender:
    """Counts what is under way; yields to the others before it answers."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.under_way = self.most = 0

    async def __call__(self, item: int) -> None:
        self.sent.append(item)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1


async def test_a_closed_load_keeps_so_many_in_flight_and_sends_each_item_once() -> None:
    sender = Sender()
    result = await closed(sender, range(100), 7)
    assert (sender.most, sender.sent, result.num_requests) == (7, [*range(100)], 100)


async def test_what_an_answer_entails_is_load_and_no_latency(clock: Clock) -> None:
    async def send(item: int) -> Settle:
        clock.now_s += 1

        async def settle() -> None:
            clock.now_s += 4

        return settle

    result = await closed(send, range(10), 1)
    assert result.latencies_s == (1.0,) * 10
    assert (result.seconds, result.throughput, result.client_cpu_s) == (50.0, 0.2, 5.0)


async def test_latencies_of_an_open_load_count_from_when_they_were_due(clock: Clock) -> None:
    async def send(item: int) -> None:
        clock.now_s += 1

    result = await opened(send, range(5), 1e9, seed=1, most=1)
    assert result.latencies_s == pytest.approx((1, 2, 3, 4, 5), abs=1e-6)


async def test_an_open_load_has_at_most_so_many_under_way() -> None:
    sender = Sender()
    result = await opened(sender, range(100), 1e9, seed=1, most=5)
    assert (sender.most, sorted(sender.sent), result.num_requests) == (5, [*range(100)], 100)


async def test_an_open_load_does_not_wait_for_answers() -> None:
    sent: list[int] = []
    everyone = asyncio.Event()

    async def send(item: int) -> None:
        sent.append(item)
        if len(sent) == 20:
            everyone.set()
        await everyone.wait()

    result = await asyncio.wait_for(opened(send, range(20), 1e6, seed=1, most=20), 30)
    assert result.num_requests == 20


def test_arrivals_are_as_many_as_asked_and_the_same_for_a_seed() -> None:
    moments = [*islice(load._arrivals(50.0, 3, 1000.0), 10_000)]
    assert moments == [*islice(load._arrivals(50.0, 3, 1000.0), 10_000)]
    assert moments != [*islice(load._arrivals(50.0, 4, 1000.0), 10_000)]
    assert (moments[-1] - 1000.0) / 10_000 == pytest.approx(1 / 50, rel=0.05)
    gaps = sorted(later - earlier for earlier, later in pairwise(moments))
    assert gaps[len(gaps) // 2] == pytest.approx(0.693 / 50, rel=0.05)  # a Poisson process's, not a metronome's


async def test_a_failed_request_ends_the_load_and_all_that_is_under_way() -> None:
    ended = []

    async def send(item: int) -> None:
        if item == 3:
            raise OSError("gone")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(item)

    with pytest.raises(LoadError, match=r"OSError\('gone'\)"):
        await closed(send, range(10), 5)
    assert sorted(ended) == [0, 1, 2, 4]


async def test_what_an_answer_entails_may_fail_no_more_than_the_request() -> None:
    async def send(item: int) -> Settle:
        async def settle() -> None:
            raise OSError("not released")

        return settle

    with pytest.raises(LoadError, match="not released"):
        await closed(send, range(10), 2)


@pytest.mark.parametrize(("rate", "most"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
async def test_an_open_load_that_makes_no_sense_is_refused(rate: float, most: int) -> None:
    with pytest.raises(ValueError, match=f"rate is {rate} and most is {most}"):
        await opened(Sender(), range(3), rate, seed=1, most=most)


async def test_a_closed_load_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="in_flight is 0"):
        await closed(Sender(), range(3), 0)
    with pytest.raises(ValueError, match="latencies_s is empty"):
        await closed(Sender(), range(0), 1)


def test_percentiles_are_latencies_that_were_seen() -> None:
    result = Result(seconds=10, latencies_s=tuple(range(1, 101)), client_cpu_s=1)
    assert (result.p50_s, result.p99_s, result.percentile_s(100), result.percentile_s(0)) == (50, 99, 100, 1)
    assert Result(seconds=1, latencies_s=(3.0,), client_cpu_s=0).p99_s == 3.0
