"""The table of ceilings: what was counted when it was last written, by place, and what is more than that now."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import tomllib

CEILINGS = Path(__file__).parent / "ceilings.toml"
MARGIN = {"calls": 0.03}
"""How much more than in the table is let through, of measures that other releases of Python or a library move."""
_SHARE = 0.04
"""A place with less of a measure than this is not named in the table."""
_HEAD = """\
# What a step and an item may cost on the CPU path, counted by tests/unit/counts. `total` is the ceiling, of calls with
# a margin of 3 %; the rest says where it is, for places with at least 4 %.
#
# A change that costs less: write the table anew, which lowers the ceilings, and commit it with the change.
# A change that has to cost more: the same, and the commit says what for. Never edit a number by hand.
#
#     python -m tests.unit.counts
"""

Measures = Mapping[str, "Counter[str]"]
"""By measure, the counts by place: the name of an operator, or "file:function"."""
Table = Mapping[str, Mapping[str, Mapping[str, int]]]


def load(path: Path = CEILINGS) -> Table:
    """The table: by case and measure, the total and the counts by place."""
    return tomllib.loads(path.read_text())


def save(cases: Mapping[str, Measures], path: Path = CEILINGS) -> None:
    """Writes the table anew from what was measured."""
    sections = [_section(case, name, counts) for case, measures in cases.items() for name, counts in measures.items()]
    path.write_text("\n".join([_HEAD, *sections]))


def excess(case: str, measures: Measures, table: Table) -> list[str]:
    """A line for each measure that is over its ceiling: the numbers, and the places where it grew."""
    return [
        _complaint(case, name, counts, ceiling)
        for name, counts in measures.items()
        if counts.total() > (ceiling := table[case][name])["total"] * (1 + MARGIN.get(name, 0.0))
    ]


def place(name: str) -> str:
    """What counts together: a file of ours, another package as a whole, an operator."""
    file, is_call, _ = name.partition(":")
    if not is_call or file.startswith(("producer/", "tests/")):
        return file
    package = re.match(r"[\w<.-]+", file)
    word = package.group() if package else file
    return "python" if word.endswith(".py") or word.startswith("<") or word in _PYTHON else word


_PYTHON = {"asyncio", "collections", "concurrent", "ctypes", "importlib", "json", "logging", "multiprocessing"}


def _by_place(counts: "Counter[str]") -> "Counter[str]":
    places: Counter[str] = Counter()
    for name, number in counts.items():
        places[place(name)] += number
    return places


def _section(case: str, measure: str, counts: "Counter[str]") -> str:
    named = [(name, n) for name, n in _by_place(counts).most_common() if n >= _SHARE * counts.total()]
    lines = [f'["{case}".{measure}]', f"total = {counts.total()}", *(f'"{name}" = {n}' for name, n in named)]
    return "\n".join(lines) + "\n"


def _complaint(case: str, measure: str, counts: "Counter[str]", ceiling: Mapping[str, int]) -> str:
    few = _SHARE * ceiling["total"]  # of a place that the table does not name, it is only known that it had less
    now = _by_place(counts)
    grown = {name: n - ceiling.get(name, few) for name, n in now.items() if n > ceiling.get(name, few)}
    places = (
        sorted(grown, key=lambda name: -grown[name])[:3]
        or [name for name, _ in now.most_common() if name not in ceiling][:6]
    )
    where = [f"{name}: {ceiling.get(name, 'few')} -> {now[name]}{_detail(name, counts)}" for name in places]
    return f"{case}: {counts.total()} {measure}, at most {ceiling['total']} are allowed. {'; '.join(where)}"


def _detail(name: str, counts: "Counter[str]") -> str:
    """The functions that are called most in a place."""
    functions = Counter({one: n for one, n in counts.items() if ":" in one and place(one) == name})
    return "".join(f"\n    {n:6} {one}" for one, n in functions.most_common(6))
