"""The picture of a run: throughput and latency of both sides, by requests in flight and by arrivals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bench.measure import Sample
from bench.results import OURS, PEER, loads, medians, paired

COLOURS = {OURS: "tab:blue", PEER: "tab:orange"}
DPI = 120


def draw(path: Path, title: str, closed: Sequence[Sample], opened: Sequence[Sample]) -> None:
    """Writes a PNG; medians over repeats."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    axes = figure.subplots(1, 3)
    figure.suptitle(title)
    axes[0].set(title="closed load", xlabel="in flight", ylabel="requests a second", xscale="log")
    axes[1].set(title="closed load", xlabel="in flight", ylabel="latency, ms", xscale="log", yscale="log")
    axes[2].set(title="open load", xlabel="arrivals a second", ylabel="latency, ms", yscale="log")
    _lines(axes[0], closed, {"throughput": "-"})
    _lines(axes[1], closed, {"p50_ms": "-", "p99_ms": "--"})
    _lines(axes[2], opened, {"p50_ms": "-", "p99_ms": "--"})
    axes[0].set_ylim(bottom=0)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=DPI)


def _lines(axis: Any, samples: Sequence[Sample], figures: dict[str, str]) -> None:
    places = loads(samples)
    marks = [next(iter(load.values())) for load in places]
    for index, side in enumerate((OURS, PEER)):
        found = [medians([pair[index] for pair in paired(samples, load)]) for load in places]
        for name, style in figures.items():
            label = f"{side}, {name.removesuffix('_ms')}"
            axis.plot(marks, [one[name] for one in found], style, marker="o", color=COLOURS[side], label=label)
    axis.set_xticks(marks, [f"{mark:.0f}" for mark in marks])
    axis.xaxis.set_minor_locator(NullLocator())
