"""What a Prometheus metric is declared with, at the producer and in the shim. Nothing here counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import grpc

PREFIX: Final = "ec_producer_"
"""Of every metric's name."""

SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""Upper bounds of the buckets of every histogram of times: half a millisecond to a minute."""

GRPC_CODES: Final = tuple(code.name for code in grpc.StatusCode)

Kind: TypeAlias = Literal["counter", "gauge", "histogram", "info"]
Allowed: TypeAlias = Sequence[str] | range
"""All values that a label may have. `ONE` of an info's: whatever the process has, set once."""
ONE: Final = ("*",)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Declaration:
    """One metric. What a scrape adds to a name (`_total`, `_info`, `_bucket`, …) is not part of it."""

    name: str
    """Without the prefix."""
    kind: Kind
    unit: str
    """What is counted or measured: `seconds`, `bytes`, or a word such as `items`."""
    meaning: str
    """One line; the metric's HELP."""
    look: str
    """When a person should look at it, and what it tells then."""
    labels: Mapping[str, Allowed] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def num_series(self) -> int:
        """How many sets of label values there can be at most."""
        number = 1
        for values in self.labels.values():
            number *= len(values)
        return number

    def allows(self, label: str, value: str) -> bool:
        """Whether `label` is one of its, and may have `value`."""
        values = self.labels.get(label, ())
        if values is ONE:
            return True
        return (value.isdecimal() and int(value) in values) if isinstance(values, range) else value in values
