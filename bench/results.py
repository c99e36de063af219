"""What a run comes to: ratios with their targets, and tables of text."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.measure import Sample

OURS, PEER = "ours", "peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A ratio, ours over the peer's, and what it should be."""

    ratio: str
    bound: float
    at_least: bool

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def row(self, value: float) -> dict[str, object]:
        """As the results have it."""
        return {"at_least" if self.at_least else "at_most": self.bound, "is_met": self.is_met(value)}

    def line(self, value: float) -> str:
        sign = "at least" if self.at_least else "at most"
        return f"{self.ratio:16} {value:6.3f}   {sign} {self.bound:.3g}   {'OK' if self.is_met(value) else 'MISSED'}"


CPU_TARGETS = (
    Target(ratio="throughput_ratio", bound=2.5, at_least=True),
    Target(ratio="latency_ratio", bound=1 / 3, at_least=False),
    Target(ratio="memory_ratio", bound=1 / 2, at_least=False),
)
"""Against tiny models on a CPU, where overheads are compared."""


def throughput_ratio(samples: Sequence[Sample], in_flight: int) -> float:
    """Ours over the peer's, with so many in flight: the median of the repeats' ratios."""
    pairs = paired(samples, {"in_flight": in_flight})
    return statistics.median(ours.result.throughput / peer.result.throughput for ours, peer in pairs)


def latency_ratio(samples: Sequence[Sample], in_flight: int = 1) -> float:
    """As `throughput_ratio`, of the median latencies."""
    pairs = paired(samples, {"in_flight": in_flight})
    return statistics.median(ours.result.p50_s / peer.result.p50_s for ours, peer in pairs)


def paired(samples: Sequence[Sample], load: Mapping[str, float]) -> list[tuple[Sample, Sample]]:
    """Ours and the peer's under the same load in the same repeat.

    Raises:
        ValueError: one has no other, or there is none.
    """
    sides = [{one.repeat: one for one in samples if (one.side, one.load) == (side, load)} for side in (OURS, PEER)]
    if not sides[0] or sides[0].keys() != sides[1].keys():
        counts = ", ".join(f"{len(found)} of {side}" for side, found in zip((OURS, PEER), sides, strict=True))
        raise ValueError(f"under load {dict(load)} there are {counts}; needed is one of each in every repeat")
    return [(sides[0][repeat], sides[1][repeat]) for repeat in sorted(sides[0])]


def loads(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """The different loads, in the order in which they came."""
    return [dict(load) for load in dict.fromkeys(tuple(one.load.items()) for one in samples)]


def load_lines(samples: Sequence[Sample]) -> Iterator[str]:
    """A table of both sides under each load; medians over repeats, CPU for one request."""
    yield f"{'':16}" + "".join(f"  {title:>17}" for title in _COLUMNS.values()) + f"  {'others,':>7}"
    yield f"{'':16}" + f"  {OURS:>8} {PEER:>8}" * len(_COLUMNS) + f"  {'cores':>7}"
    for load in loads(samples):
        sides = [medians(side) for side in zip(*paired(samples, load), strict=True)]
        cells = (f"  {sides[0][name]:8.{digits}f} {sides[1][name]:8.{digits}f}" for name, digits in _DIGITS.items())
        yield f"{_name(load):16}{''.join(cells)}  {max(side['other_cores'] for side in sides):7.2f}"


def medians(samples: Sequence[Sample]) -> dict[str, float]:
    """Of each figure, over repeats."""
    rows = [one.figures for one in samples]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


_COLUMNS = {
    "throughput": "requests/s",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "server_cpu_ms": "server CPU, ms",
    "client_cpu_ms": "client CPU, ms",
}
_DIGITS = dict.fromkeys(_COLUMNS, 1) | {"server_cpu_ms": 2, "client_cpu_ms": 2}


def _name(load: Mapping[str, float]) -> str:
    return f"{load['in_flight']} in flight" if "in_flight" in load else f"{load['rate']:.0f} arrivals/s"
