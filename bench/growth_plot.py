"""The picture of how the service grows: each curve over its first point, and the simulated pools."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.curves import Point
from bench.simulation import PoolFigures


def draw(path: Path, curves: Mapping[str, Sequence[Point]], pools: Sequence[PoolFigures]) -> None:
    """Throughput, latency and memory of each curve, each over its first point; and the pools."""
    figure = Figure(figsize=(16, 8), layout="constrained")
    axes = list(figure.subplots(2, 4).flat)
    for axis, (name, curve) in zip(axes, curves.items(), strict=False):
        xs = [one.x for one in curve]
        axis.set(title=name, xscale="log", yscale="log", ylabel="over the first point")
        for value in ("throughput", "p50_ms", "server_cpu_ms", "memory_mib"):
            axis.plot(xs, [getattr(one, value) / getattr(curve[0], value) for one in curve], marker="o", label=value)
        axis.set_xticks(xs, [f"{x:g}" for x in xs])
        axis.minorticks_off()
    for mix in dict.fromkeys(one.mix for one in pools):
        figures = [one for one in pools if one.mix == mix]
        for value in ("put_us", "pin_us"):
            label, times = f"{value.removesuffix('_us')}, {mix}", [getattr(one, value) for one in figures]
            axes[-1].plot([one.gib for one in figures], times, marker="o", label=label)
    axes[-1].set(title="pool, simulated", xscale="log", xlabel="GiB", ylabel="CPU us")
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.has_data():
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=100)
