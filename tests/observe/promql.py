"""A panel of the dashboard, and the PromQL that most of them are made of."""

from collections.abc import Sequence
from dataclasses import dataclass

PICKED = 'namespace=~"$namespace", instance=~"$instance"'
"""The producers that are chosen at the top of the dashboard."""
CONSUMERS = 'namespace=~"$namespace"'
"""Their metrics come from vLLM, so that the chosen instances are others than theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    unit: str
    """A unit's name as Grafana has it."""
    about: str
    """What is seen, and what to do where it is not as it should be."""
    queries: tuple[tuple[str, str], ...]
    """PromQL, and the legend of what it gives."""
    kind: str = "timeseries"
    """`timeseries`, `stat` or `table`."""
    width: int = 8
    """Of 24."""
    stacked: bool = False
    is_state: bool = False
    """Values are 1 for up and 0 for down."""


def rate(metric: str, by: str = "", match: str = "", picked: str = PICKED) -> str:
    """The sum of a counter's rates, by labels."""
    return f"sum{_by(by)}(rate({_series(metric, match, picked)}[$__rate_interval]))"


def seen(metric: str, by: str, picked: str = PICKED) -> str:
    """As `rate`, without the label values of which there is nothing now; a counter has all from its start."""
    return f"{rate(metric, by, picked=picked)} > 0"


def mean(metric: str, by: str = "") -> str:
    """Of what a histogram observed."""
    return f"{rate(f'{metric}_sum', by)} / {rate(f'{metric}_count', by)}"


def quantiles(
    metric: str, by: str = "", *, match: str = "", of: Sequence[float] = (0.5, 0.95), picked: str = PICKED
) -> tuple[tuple[str, str], ...]:
    """Of a histogram, by a label, each with its legend."""
    buckets = rate(f"{metric}_bucket", f"le, {by}" if by else "le", match, picked)
    label = f"{{{{{by}}}}} " if by else ""
    return tuple((f"histogram_quantile({q:g}, {buckets})", f"{label}p{q * 100:g}") for q in of)


def gauge(metric: str, by: str = "instance", match: str = "") -> str:
    return f"sum{_by(by)}({_series(metric, match, PICKED)})"


def share(part: str, others: str) -> str:
    """`part` of `part` and `others`."""
    return f"{part} / ({part} + {others})"


def _series(metric: str, match: str, picked: str) -> str:
    return f"{metric}{{{', '.join(filter(None, (picked, match)))}}}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
