"""What `bench.gpu` is to show, and the table that says whether it did. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

OURS, PEER = "ours", "peer"
BEST = 2.0
"""How many times as fast as the peer at its best settings the service is to be."""
Look = Callable[[str], float | None]
"""The figure at a place, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of each side; `bound` None where it is shown and nothing is asked of it."""

    what: str
    place: str
    """In the record, with {} where the side's name is."""
    bound: float | None = None
    at_least: bool = False
    below_peer: bool = False
    """Whether the peer's own figure is the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A row with its figures; None for what was not measured."""

    row: Row
    ours: float | None
    peer: float | None
    best: float | None
    """The best of the peer's, at any settings but those of `peer`."""

    @property
    def bound(self) -> float | None:
        return self.peer if self.row.below_peer else self.row.bound

    @property
    def is_met(self) -> bool | None:
        """None where nothing is asked or something was not measured."""
        if self.ours is None or self.bound is None:
            return None
        return self.ours >= self.bound if self.row.at_least else self.ours < self.bound or self.ours == self.row.bound

    def times(self, other: float | None) -> float | None:
        """How many times as good as `other` ours is."""
        if not self.ours or not other:
            return None
        return self.ours / other if self.row.at_least else other / self.ours

    @property
    def beats_best(self) -> bool | None:
        """Whether it is `BEST` times as good as the peer at its best."""
        times = self.times(self.best)
        return None if times is None else times >= BEST

    def as_json(self) -> dict[str, object]:
        return {
            "what": self.row.what,
            "ours": self.ours,
            "peer": self.peer,
            "times_peer": self.times(self.peer),
            "peer_at_its_best": self.best,
            "times_best": self.times(self.best),
            "target": self.bound,
            "is_met": self.is_met,
        }


def _step(case: str, bound: float | None = None) -> Row:
    return Row(what=f"encoder step, {case}², ms", place=f"step/{{}}/{case}/replay_ms", bound=bound)


def _load(side: int, name: str, what: str, bound: float, *, in_flight: int = 32, at_least: bool = False) -> Row:
    return Row(
        what=f"service, {in_flight} in flight, {side}², {what}",
        place=f"service/{{}}/{side}x{in_flight}/{name}",
        bound=bound,
        at_least=at_least,
    )


ROWS = (
    _step("1x224"),
    _step("8x224"),
    _step("1x448", 3.0),
    _step("8x448"),
    _step("1x896", 10.5),
    _step("1x1036", 14.0),
    _step("4x1036"),
    Row(what="host overhead a step, ms (1x448, 1x896, 1x1036)", place="step/{}/overhead_ms", bound=0.3),
    _load(448, "throughput", "img/s", 345, at_least=True),
    _load(448, "p50_ms", "p50, ms", 90),
    _load(448, "p99_ms", "p99, ms", 491 / 3),
    _load(1036, "throughput", "img/s", 68, at_least=True),
    _load(1036, "p50_ms", "p50, ms", 460),
    _load(1036, "p99_ms", "p99, ms", 2101 / 3),
    _load(448, "p50_ms", "p50, ms", 8, in_flight=1),
    Row(what="start to ready without weight loading, s", place="start/{}/ready_without_weights_s", bound=10.0),
    Row(what="time to first token, 448², ms", place="ttft/{}/448/median_ms", below_peer=True),
    Row(what="time to first token, 1036², ms", place="ttft/{}/1036/median_ms", below_peer=True),
)
"""The targets; the peer of the last two is a monolithic vLLM. Those of p99 are a third of what the peer once took."""


def found(look: Look, bests: Sequence[str]) -> list[Found]:
    """All rows; `bests` are the names of the peer's better settings."""
    rows = []
    for row in ROWS:
        others = [value for name in bests if (value := look(row.place.format(name))) is not None]
        rows.append(
            Found(
                row=row,
                ours=look(row.place.format(OURS)),
                peer=look(row.place.format(PEER)),
                best=(max if row.at_least else min)(others) if others else None,
            )
        )
    return rows


def lines(rows: Sequence[Found]) -> Iterator[str]:
    """The table as text."""
    yield f"{'':48} {'ours':>8} {'peer':>8} {'times':>6} {'best':>8} {'times':>6}  {'target':>9}"
    for one in rows:
        numbers = (one.ours, one.peer, one.times(one.peer), one.best, one.times(one.best))
        cells = " ".join(_cell(value, width) for value, width in zip(numbers, (8, 8, 6, 8, 6), strict=True))
        sign = ">=" if one.row.at_least else "<" if one.row.below_peer else "<="
        target = "" if one.bound is None else f"{sign} {one.bound:.4g}"
        said = {True: "OK", False: "MISSED", None: "" if one.ours is not None else "not measured"}[one.is_met]
        behind = f", under {BEST:g} times the best" if one.beats_best is False else ""
        yield f"{one.row.what:48} {cells}  {target:>9}  {said}{behind}".rstrip()


def _cell(value: float | None, width: int) -> str:
    return " " * width if value is None else f"{value:{width}.{2 if abs(value) < 100 else 1}f}"
