"""Draws the dashboard's panels as they looked in a time, with matplotlib: what Grafana shows, more plainly."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tests.observe.grafana import COLUMNS, DASHBOARD
from tests.observe.prometheus import Prometheus, Series
from tests.observe.queries import Query, may_be_empty

RATE_INTERVAL = "6s"
"""Short as the time is; a dashboard of hours has minutes."""
DPI = 84
WIDTH, LINE = 16.0, 0.25
"""Inches: of the picture, and of one of Grafana's lines."""
MARGINS = {"timeseries": (0.026, 0.006, 2.0, 1.4), "row": (0.006, 0, 0, 0)}
"""Left and right in parts of the width, above and below in lines: what a panel's title and ticks take."""
WORDS = (0.026, 0.006, 1.6, 0.4)
"""The same of panels without axes."""
INK, FAINT, GOOD, BAD = "#24292f", "#8c959f", "#1a7f37", "#cf222e"
STYLE: Any = {
    "font.size": 7,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.5,
    **{f"{axis}tick.{what}": value for axis in "xy" for what, value in (("color", FAINT), ("major.size", 2))},
}
UNITS = {"s": ("s", 1), "bytes": ("MiB", 1 / (1 << 20)), "Bps": ("KiB/s", 1 / (1 << 10)), "percentunit": ("%", 100)}
"""What a unit of Grafana's is called on an axis, and what values are multiplied with."""
PER_SECOND = ("cps", "reqps")
MAX_LEGENDS = 9
NUM_COLOURS = 64

Json = dict[str, Any]


def draw(prometheus: Prometheus, instances: str, start_s: float, end_s: float, file: Path) -> None:
    """One PNG of all panels; `instances` is a regular expression."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = json.loads(DASHBOARD.read_text())["panels"]
    num_lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    with matplotlib.rc_context(STYLE):
        figure = pyplot.figure(figsize=(WIDTH, LINE * num_lines), dpi=DPI)
        for panel in panels:
            margins = MARGINS.get(panel["type"], WORDS)
            axes = figure.add_axes(_place(panel["gridPos"], num_lines, margins))
            if panel["type"] == "row":
                axes.set_axis_off()
                axes.text(0, 0.5, panel["title"], fontsize=12, fontweight="bold", va="center")
                continue
            if panel["type"] == "timeseries":
                unit = _draw_lines(axes, panel, _ranges(prometheus, instances, panel, start_s, end_s), start_s, end_s)
            else:
                axes.set_axis_off()
                unit = _draw_words(axes, panel, prometheus, instances)
            axes.set_title(panel["title"] + (f"  [{unit}]" if unit else ""), loc="left", fontsize=8, pad=3)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, facecolor="white")
        pyplot.close(figure)
    with Image.open(file) as image:
        small = image.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def _place(
    at: Mapping[str, int], num_lines: int, margins: tuple[float, float, float, float]
) -> tuple[float, float, float, float]:
    """Left, bottom, width and height in parts of the picture."""
    left, right, above, below = margins
    bottom = num_lines - at["y"] - at["h"] + below
    return (
        at["x"] / COLUMNS + left,
        bottom / num_lines,
        at["w"] / COLUMNS - left - right,
        (at["h"] - above - below) / num_lines,
    )


def _unit(panel: Json, found: Sequence[Series]) -> tuple[str, float]:
    """What a panel's values are shown in, and what they are multiplied with for it."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    largest = max((value for series in found for _, value in series.points if not math.isnan(value)), default=1.0)
    if unit == "s" and largest < 1:
        return "ms", 1000
    return ("1/s", 1) if unit in PER_SECOND else UNITS.get(unit, ("", 1))


def _ranges(
    prometheus: Prometheus, instances: str, panel: Json, start_s: float, end_s: float
) -> list[tuple[str, Series]]:
    """Each series with its legend, the largest first; without those that are never a number."""
    found = []
    for target in panel["targets"]:
        expr = Query("", target["expr"], "panel").resolved(instances, RATE_INTERVAL)
        for series in prometheus.query_range(expr, start_s, end_s):
            if any(not math.isnan(value) for _, value in series.points):
                found.append((_legend(target["legendFormat"], series.labels), series))
    return sorted(found, key=lambda one: -sum(value for _, value in one[1].points if not math.isnan(value)))


def _legend(pattern: str, labels: Mapping[str, str]) -> str:
    for name, value in labels.items():
        pattern = pattern.replace(f"{{{{{name}}}}}", value)
    return pattern


def _draw_lines(axes: Any, panel: Json, found: Sequence[tuple[str, Series]], start_s: float, end_s: float) -> str:
    """Returns the unit that the axis has."""
    unit, scale = _unit(panel, [series for _, series in found])
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    if not found:
        exprs = " ".join(target["expr"] for target in panel["targets"])
        axes.text(0.5, 0.5, may_be_empty(exprs) or "none", transform=axes.transAxes, ha="center", color=FAINT)
    elif stacked:
        times = sorted({time for _, series in found for time, _ in series.points})
        values = [[dict(series.points).get(time, 0.0) * scale for time in times] for _, series in found]
        axes.stackplot([time - start_s for time in times], values, labels=[name for name, _ in found], alpha=0.75)
    else:
        for name, series in found:
            axes.plot(
                [time - start_s for time, _ in series.points],
                [value * scale for _, value in series.points],
                label=name,
                linewidth=1,
            )
    axes.set_xlim(0, end_s - start_s)
    top = max(axes.get_ylim()[1], 1e-3) * (1.4 if found else 1)
    axes.set_ylim(bottom=-0.03 * top, top=top)  # what is 0 all the time is seen
    axes.grid(axis="y", linewidth=0.3, color="#d0d7de")
    axes.spines[["top", "right"]].set_visible(False)
    if found:
        axes.legend(*_first(axes), fontsize=6, ncols=3, loc="upper left", frameon=False, handlelength=1, borderpad=0)
    return unit


def _first(axes: Any) -> tuple[list[Any], list[str]]:
    """As many entries of the legend as there is room for."""
    handles, names = axes.get_legend_handles_labels()
    return handles[:MAX_LEGENDS], names[:MAX_LEGENDS]


def _draw_words(axes: Any, panel: Json, prometheus: Prometheus, instances: str) -> str:
    """A stat's numbers or a table's rows, as they are now. Returns the unit."""
    (target,) = panel["targets"]
    found = prometheus.query(Query("", target["expr"], "panel").resolved(instances))
    if panel["type"] == "table":
        for number, series in enumerate(found):
            words = [f"{k}={Path(v).name}" for k, v in sorted(series.labels.items()) if k not in ("job", "namespace")]
            axes.text(0, 0.9 - 0.2 * number, "   ".join(words), fontsize=7)
        return ""
    unit, scale = _unit(panel, found)
    is_state = bool(panel["fieldConfig"]["defaults"]["mappings"])
    for number, series in enumerate(found):
        _, value = series.points[0]
        said = ("up" if value else "DOWN") if is_state else f"{value * scale:.3g}"
        colour, x = BAD if is_state and not value else GOOD, (number + 0.5) / len(found)
        axes.text(x, 0.65, said, fontsize=15, ha="center", va="center", color=colour)
        axes.text(x, 0.1, _legend(target["legendFormat"], series.labels), ha="center", va="center", color=FAINT)
    return unit
