"""Whether a curve is near-linear until its stated limit. Pure.

What is not kept while other programs computed is not judged: it may be their doing.
"""

import enum
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.curves import Point
from bench.simulation import PoolFigures

QUIET_CORES = 0.15
"""What other programs may compute, as a part of a core, for a throughput to count."""
Curve = Sequence[Point]


class State(enum.Enum):
    """What becomes of a limit."""

    OK = "it is kept"
    BROKEN = "it is not"
    NOISY = "others computed so much that nobody can tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One statement about one curve."""

    curve: str
    limit: str
    found: str
    state: State

    def line(self) -> str:
        return f"{self.state.name:6} {self.curve}: {self.limit}; {self.found}"


def _state(is_kept: bool, noisy: Curve = ()) -> State:
    """What broke on a noisy machine may be the noise."""
    if is_kept:
        return State.OK
    return State.NOISY if any(one.other_cores > QUIET_CORES for one in noisy) else State.BROKEN


def plateau(name: str, curve: Curve, *, first: float, within: float) -> Verdict:
    """From `first` on, throughput stays within a part of its plateau."""
    points = [one for one in curve if one.x >= first]
    usual = statistics.median(one.throughput for one in points)
    least = min(one.throughput for one in points) / usual
    return Verdict(
        curve=name,
        limit=f"throughput from {first:g} to {points[-1].x:g} within {within:.0%} of its plateau",
        found=f"the least is {least:.0%} of {usual:.0f}/s",
        state=_state(least >= 1 - within, points),
    )


def proportional(name: str, curve: Curve, *, first: float, within: float) -> Verdict:
    """From `first` on, the median latency follows what is in flight, as it must where throughput is constant."""
    points = [one for one in curve if one.x >= first]
    each = [one.p50_ms / one.x * one.throughput / 1000 for one in points]  # Little's law: 1 where nobody is passed over
    worst = max(abs(one - 1) for one in each)
    return Verdict(
        curve=name,
        limit=f"p50 x throughput within {within:.0%} of what is in flight, from {first:g} on: nobody starves",
        found=f"the furthest is {worst:.0%} off",
        state=_state(worst <= within, points),
    )


def tail(name: str, curve: Curve, *, first: float, most: float) -> Verdict:
    """From `first` on, the slowest of a hundred takes at most so many times the median."""
    points = [one for one in curve if one.x >= first]
    worst = max(one.p99_ms / one.p50_ms for one in points)
    return Verdict(
        curve=name,
        limit=f"p99 at most {most:g} times p50, from {first:g} on",
        found=f"at most {worst:.2f} times",
        state=_state(worst <= most, points),
    )


def slope(name: str, curve: Curve, value: Callable[[Point], float], unit: str, *, most: float, free: float) -> Verdict:
    """A value grows at most `most` for each step of x, and by `free` beside that."""
    first, last = curve[0], max(curve, key=value)
    grown = value(last) - value(first)
    allowed = free + most * (last.x - first.x)
    return Verdict(
        curve=name,
        limit=f"{unit} grow by at most {most:g} for each, and {free:g}",
        found=f"{value(first):.1f} at {first.x:g}, at most {value(last):.1f}, at {last.x:g}",
        state=_state(grown <= allowed),
    )


def per_x(name: str, curve: Curve, *, first: float, power: float, within: float) -> Verdict:
    """From `first` on, CPU time of an item grows no faster than `x` to the `power`."""
    points = [one for one in curve if one.x >= first]
    base = points[0].server_cpu_ms / points[0].x ** power
    worst = max(one.server_cpu_ms / one.x**power for one in points) / base
    return Verdict(
        curve=name,
        limit=f"CPU time of an item over x^{power:g} grows by at most {within:.0%} from {first:g} on",
        found=f"{worst - 1:+.0%}",
        state=_state(worst <= 1 + within, points),
    )


def never_worse(name: str, curve: Curve, *, within: float) -> Verdict:
    """A larger x costs no more CPU time an item than any smaller one."""
    least, worst = curve[0].server_cpu_ms, 0.0
    for one in curve:
        worst = max(worst, one.server_cpu_ms / least - 1)
        least = min(least, one.server_cpu_ms)
    return Verdict(
        curve=name,
        limit=f"CPU time of an item grows by at most {within:.0%} over that of any smaller one",
        found=f"{worst:+.0%}",
        state=_state(worst <= within, curve),
    )


def shares(name: str, found: Sequence[Sequence[int]], *, within: float) -> Verdict:
    """Of several producers each gets its part of the items."""
    worst = max(abs(share * len(one) / sum(one) - 1) for one in found for share in one)
    return Verdict(
        curve=name,
        limit=f"each producer gets its part, within {within:.0%}",
        found=f"{'; '.join(' '.join(map(str, one)) for one in found)}: at most {worst:.0%} off",
        state=_state(worst <= within),
    )


def pool(figures: Sequence[PoolFigures], *, most: float, least_used: float, most_evicted: float) -> list[Verdict]:
    """Each mix, from the smallest pool to the largest."""
    found = []
    for mix in dict.fromkeys(one.mix for one in figures):
        curve = [one for one in figures if one.mix == mix]
        for name, times in (
            ("put", [one.put_us for one in curve]),
            ("pin", [one.pin_us for one in curve]),
        ):
            worst = max(times) / times[0]
            found.append(
                Verdict(
                    curve=f"pool, {mix}",
                    limit=f"a {name} takes at most {most:g} times as long at any size as at {curve[0].gib:g} GiB",
                    found=f"{times[0]:.2f} us, at most {worst:.2f} times that with {curve[-1].entries} entries",
                    state=_state(worst <= most),
                )
            )
        used, evicted = min(one.used for one in curve), max(one.evicted for one in curve)
        refused = sum(one.refused for one in curve)
        found.append(
            Verdict(
                curve=f"pool, {mix}",
                limit=f"{least_used:.0%} in use, at most {most_evicted:g} evicted a put, no put refused",
                found=f"{used:.0%}, {evicted:.2f}, {refused}",
                state=_state(used >= least_used and evicted <= most_evicted and not refused),
            )
        )
    return found
