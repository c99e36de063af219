"""What a run comes to, as JSON and as text."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone

from bench import machine, stages
from bench.measure import Sample
from bench.memory import Memory
from bench.results import CPU_TARGETS, OURS, PEER, latency_ratio, load_lines, loads, throughput_ratio

QUIET = 0.3
"""Cores that other things may take before it is said."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What was measured so far."""

    closed: list[Sample] = field(default_factory=list)
    opened: list[Sample] = field(default_factory=list)
    memory: dict[str, dict[str, Memory]] = field(default_factory=dict)
    """By side and process, after the closed loads."""
    ready_after_s: dict[str, float] = field(default_factory=dict)
    """By side, from the start until it could be used."""
    stage_rows: list[dict[str, object]] = field(default_factory=list)
    service: dict[str, stages.InService] = field(default_factory=dict)

    @property
    def in_flights(self) -> list[int]:
        return sorted(int(load["in_flight"]) for load in loads(self.closed))

    def busiest(self, side: str) -> list[Sample]:
        """Of each repeat, with the most in flight."""
        load = {"in_flight": self.in_flights[-1]}
        return [one for one in self.closed if (one.side, one.load) == (side, load)]

    def ratios(self) -> dict[str, float]:
        """Ours over the peer's: throughput with the most in flight, latency with the fewest, unique memory."""
        sums = self.memory_bytes("unique_bytes")
        return {
            "throughput_ratio": throughput_ratio(self.closed, self.in_flights[-1]),
            "latency_ratio": latency_ratio(self.closed, self.in_flights[0]),
            "memory_ratio": sums[OURS] / sums[PEER],
        }

    def memory_bytes(self, kind: str) -> dict[str, int]:
        """By side, the sum of all processes' `unique_bytes` or `proportional_bytes`."""
        return {side: sum(getattr(one, kind) for one in found.values()) for side, found in self.memory.items()}

    @property
    def shared_memory_ratio(self) -> float:
        """As `memory_ratio`, with equal shares of what several processes have mapped: forks hide that from unique."""
        sums = self.memory_bytes("proportional_bytes")
        return sums[OURS] / sums[PEER]

    @property
    def other_cores(self) -> float:
        """The most that other things took during a closed load: the machine's noise."""
        return max(one.other_cores for one in self.closed)

    def missed(self) -> list[str]:
        """A line for each target."""
        ratios = self.ratios()
        return [target.line(ratios[target.ratio]) for target in CPU_TARGETS if not target.is_met(ratios[target.ratio])]


def as_json(run: Run, settings: Mapping[str, object], command: str) -> dict[str, object]:
    """All that was measured, and of what."""
    ratios = run.ratios()
    return {
        **ratios,
        "memory_ratio_with_shares": run.shared_memory_ratio,
        "targets": {target.ratio: target.row(ratios[target.ratio]) for target in CPU_TARGETS},
        "other_cores": run.other_cores,
        "closed": [one.row() for one in run.closed],
        "open": [one.row() for one in run.opened],
        "memory_bytes": {
            side: {name: asdict(one) for name, one in found.items()} for side, found in run.memory.items()
        },
        "ready_after_s": run.ready_after_s,
        "stages": run.stage_rows,
        "service": {name: asdict(one) for name, one in run.service.items()},
        "threads_ms": stages.thread_ms(run.busiest(OURS)),
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "settings": dict(settings),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def lines(run: Run) -> Iterator[str]:
    """All tables, and how each target was met."""
    ratios = run.ratios()
    yield from ("", *load_lines(run.closed), "", *load_lines(run.opened), "")
    yield from stages.lines(run.stage_rows, run.service)
    yield f"\nWhat the service's threads compute for an item with {run.in_flights[-1]} in flight, ms:"
    yield from (*stages.thread_lines(run.busiest(OURS)), "")
    unique, proportional = run.memory_bytes("unique_bytes"), run.memory_bytes("proportional_bytes")
    for side, processes in run.memory.items():
        parts = ", ".join(f"{name}: {one.unique_bytes >> 20}" for name, one in processes.items())
        yield f"{side}: {unique[side] >> 20} MiB unique ({parts})"
        shared = f"{proportional[side] >> 20} MiB with shares of the rest"
        yield f"      {shared}; ready after {run.ready_after_s[side]:.1f} s"
    yield f"With shares of what several processes have mapped, the ratio of memory is {run.shared_memory_ratio:.3f}."
    yield ""
    if run.other_cores > QUIET:
        yield f"Other things took up to {run.other_cores:.1f} cores: on a quiet machine the ratios are others."
    yield from (target.line(ratios[target.ratio]) for target in CPU_TARGETS)
