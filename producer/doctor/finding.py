"""What a check is, what it looks at, and what it finds."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from producer.config import ServeConfig
from producer.doctor.probe import Prober


class Grade(str, enum.Enum):
    FINE = "fine"
    WARNING = "warning"
    """It works, and something is worse than it could be."""
    WRONG = "wrong"
    """`serve` would not start with it, or not do what it was told."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what there is, and what to do where it is not fine."""

    grade: Grade
    what: str
    do: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """What is to be served, and how to ask what may hang or crash."""

    config: ServeConfig
    model: str
    """Folder or hub name, "" where none was named."""
    prober: Prober = field(default_factory=Prober)


@dataclass(frozen=True, slots=True)
class Check:
    """`run` is called on a thread of its own; what it has not answered in `timeout_s` is given up."""

    name: str
    run: Callable[[Deployment], list[Finding]]
    timeout_s: float = 10.0


def fine(what: str) -> list[Finding]:
    return [Finding(Grade.FINE, what)]


def warning(what: str, do: str) -> list[Finding]:
    return [Finding(Grade.WARNING, what, do)]


def wrong(what: str, do: str) -> list[Finding]:
    return [Finding(Grade.WRONG, what, do)]


def size(num_bytes: float) -> str:
    """For people, in the units that settings take."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
