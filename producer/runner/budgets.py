"""The budget ladder: for how many rows a graph is captured, and which graph a step replays. Pure arithmetic.

A step pays for all rows of its graph, so there are eight rungs from each power of two to the next.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")

RUNGS = 8
"""From each power of two to the next."""


def ladder(smallest: int, largest: int, *, multiple: int) -> tuple[int, ...]:
    """Budgets in rows from `smallest` to `largest`, `RUNGS` from each power of two to the next, all `multiple`s.

    Args:
        smallest: rows of the smallest item worth a graph of its own; rounded up.
        largest: rows of the largest graph; rounded down. Below `smallest` there are no budgets.
        multiple: what each budget is divisible by.
    """
    budget = -(-smallest // multiple) * multiple
    largest -= largest % multiple
    budgets = []
    while budget < largest:
        budgets.append(budget)
        rung = (1 << budget.bit_length() - 1) // RUNGS
        budget += max(multiple, rung - rung % multiple)
    return (*budgets, largest) if largest >= smallest else ()


def smallest_fit(budgets: Sequence[int], num_rows: int) -> int | None:
    """The first of the ascending `budgets` that holds `num_rows`; None where none does."""
    index = bisect_left(budgets, num_rows)
    return budgets[index] if index < len(budgets) else None


def waste(budgets: Sequence[int], sizes: Iterable[int]) -> float:
    """Rows of padding as a part of all rows that are computed when each of `sizes` that fits is a step of its own."""
    fits = [(size, fit) for size in sizes if (fit := smallest_fit(budgets, size)) is not None]
    computed = sum(fit for _, fit in fits)
    return 1 - sum(size for size, _ in fits) / computed if computed else 0.0


def pack(items: Iterable[ItemT], fits: Callable[[Sequence[ItemT]], bool]) -> Iterator[list[ItemT]]:
    """Consecutive runs of `items`, each as long as `fits` says; an item that does not fit alone is a run of its own."""
    run: list[ItemT] = []
    for item in items:
        if run and not fits([*run, item]):
            yield run
            run = []
        run.append(item)
    if run:
        yield run
