"""Verdicts on curves: each keeps what is near-linear, and breaks on what is not."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench import simulation, verdicts
from bench.curves import Point
from bench.verdicts import State, Verdict

XS = (1, 8, 16, 32)


def curve(**values: Sequence[float]) -> list[Point]:
    """A service with four stages of a millisecond each: 1000 items a second from 4 in flight on."""
    flat: dict[str, Any] = {"client_cpu_ms": 1, "server_cpu_ms": 4, "memory_mib": 100, "other_cores": 0}
    points = [Point(x=x, throughput=min(1000, 250 * x), p50_ms=max(4, x), p99_ms=2 * max(4, x), **flat) for x in XS]
    for name, found in values.items():
        points = [replace(point, **{name: value}) for point, value in zip(points, found, strict=True)]
    return points


def plateau(points: list[Point]) -> Verdict:
    return verdicts.plateau("curve", points, first=8, within=0.15)


def test_a_plateau_may_dip_a_little() -> None:
    assert plateau(curve()).state is State.OK
    assert plateau(curve(throughput=[250, 1000, 900, 1000])).state is State.OK
    assert plateau(curve(throughput=[250, 1000, 1000, 700])).state is State.BROKEN
    assert plateau(curve(throughput=[250, 1000, 1000, 700])).found == "the least is 70% of 1000/s"


def test_what_breaks_on_a_noisy_machine_is_not_judged() -> None:
    broken = curve(throughput=[250, 1000, 1000, 700])
    assert plateau([replace(point, other_cores=0.5) for point in broken]).state is State.NOISY
    assert plateau([replace(point, other_cores=0.1) for point in broken]).state is State.BROKEN
    assert plateau([replace(point, other_cores=0.5) for point in curve()]).state is State.OK


def test_latency_must_follow_what_is_in_flight() -> None:
    assert verdicts.proportional("curve", curve(), first=8, within=0.25).state is State.OK
    starved = curve(p50_ms=[4, 8, 16, 10])  # half wait much longer than the others
    assert verdicts.proportional("curve", starved, first=8, within=0.25).state is State.BROKEN


def test_the_tail_is_bounded() -> None:
    assert verdicts.tail("curve", curve(), first=8, most=3).state is State.OK
    assert verdicts.tail("curve", curve(p99_ms=[8, 16, 100, 64]), first=8, most=3).state is State.BROKEN


@pytest.mark.parametrize(("most", "is_kept"), [(1.0, True), (0.2, False)])
def test_memory_may_grow_by_a_slope(most: float, is_kept: bool) -> None:
    points = curve(memory_mib=[100, 109, 120, 135])
    found = verdicts.slope("curve", points, lambda one: one.memory_mib, "MiB", most=most, free=5)
    assert found.state is (State.OK if is_kept else State.BROKEN)


def test_cost_may_follow_pixels_and_no_more() -> None:
    def judged(costs: list[float]) -> bool:
        points = [
            replace(one, x=x, server_cpu_ms=cost) for one, x, cost in zip(curve(), (1, 2, 4, 8), costs, strict=True)
        ]
        return verdicts.per_x("curve", points, first=2, power=2, within=0.25).state is State.OK

    assert judged([9, 4, 16, 64])
    assert judged([9, 4, 16, 79])
    assert not judged([9, 4, 16, 128])


def test_a_larger_budget_costs_no_more() -> None:
    assert verdicts.never_worse("curve", curve(server_cpu_ms=[4, 2, 2.1, 2]), within=0.1).state is State.OK
    assert verdicts.never_worse("curve", curve(server_cpu_ms=[4, 2, 3, 2]), within=0.1).state is State.BROKEN


def test_each_producer_gets_its_part() -> None:
    assert verdicts.shares("curve", [[100], [55, 45]], within=0.3).state is State.OK
    assert verdicts.shares("curve", [[100], [70, 30]], within=0.3).state is State.BROKEN


def test_a_simulated_pool_is_full_and_judged() -> None:
    small, large = (simulation.simulate("small", gib, operations=200, seed=1) for gib in (1 / 64, 1 / 16))
    assert (small.entries, large.entries) == (256, 1024)
    assert (small.used, small.evicted, small.refused) == (1, 1, 0)

    def judged(**values: float) -> list[bool]:
        given = [replace(one, put_us=8, pin_us=2) for one in (small, large)]
        found = verdicts.pool([given[0], replace(given[1], **values)], most=4, least_used=0.7, most_evicted=1.2)
        return [one.state is State.OK for one in found]

    assert judged() == [True, True, True]
    assert judged(put_us=40) == [False, True, True]
    assert judged(pin_us=40) == [True, False, True]
    assert judged(used=0.5) == judged(evicted=3) == judged(refused=1) == [True, True, False]
