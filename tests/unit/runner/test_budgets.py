"""The budget ladder: its rungs, which of them a step takes, and what its padding costs."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.runner.budgets import RUNGS, ladder, pack, smallest_fit, waste

BUDGETS = ladder(64, 4096, multiple=32)
"""As the defaults of `graph_rows` and `graph_items` make them."""
CELL = 28
"""Pixels of a row's side, of Qwen2.5-VL."""


def pictures(count: int) -> list[int]:
    """Rows of pictures: sides of 224 to 1600 pixels, their logarithms evenly spread, at ratios of 1:2 to 2:1."""
    draw = random.Random(0)
    sides = (math.exp(draw.uniform(math.log(224), math.log(1600))) for _ in range(count))
    stretched = ((side, math.sqrt(2) ** draw.uniform(-1, 1)) for side in sides)
    return [round(side * ratio / CELL) * round(side / ratio / CELL) for side, ratio in stretched]


MIX = pictures(20_000)


def test_padding_is_at_most_7_percent_of_the_work_on_average() -> None:
    assert 40 < min(MIX) < 64
    assert 3000 < max(MIX) < BUDGETS[-1]
    each = sum(waste(BUDGETS, [size]) for size in MIX) / len(MIX)
    assert waste(BUDGETS, MIX) <= 0.05
    assert each <= 0.07


def test_powers_of_two_waste_more_than_four_times_as_much() -> None:
    powers = [1 << exponent for exponent in range(6, 13)]
    assert waste(powers, MIX) > 0.25
    assert waste(powers, MIX) > 4 * waste(BUDGETS, MIX)


def test_waste_is_a_part_of_what_is_computed() -> None:
    assert waste([10, 20], [5, 10, 15]) == pytest.approx(1 - 30 / 40)
    assert waste([10, 20], [21, 5]) == 0.5  # what fits no graph costs no padding
    assert waste([10], [11]) == waste([], [1]) == waste([10], []) == 0


@pytest.mark.parametrize(
    ("smallest", "largest", "multiple", "budgets"),
    [
        (64, 160, 32, (64, 96, 128, 160)),
        (64, 64, 32, (64,)),
        (60, 255, 32, (64, 96, 128, 160, 192, 224)),
        (1, 20, 1, (*range(1, 17), 18, 20)),
        (128, 320, 8, (128, 144, 160, 176, 192, 208, 224, 240, 256, 288, 320)),
        (65, 64, 32, ()),
        (65, 90, 32, ()),  # no multiple lies between
        (64, 0, 32, ()),
    ],
)
def test_rungs(smallest: int, largest: int, multiple: int, budgets: tuple[int, ...]) -> None:
    assert ladder(smallest, largest, multiple=multiple) == budgets


@given(st.integers(1, 5000), st.integers(1, 20_000), st.integers(1, 256))
def test_a_ladder_rises_by_at_most_an_eighth_between_its_ends(smallest: int, largest: int, multiple: int) -> None:
    budgets = ladder(smallest, largest, multiple=multiple)
    first, last = -(-smallest // multiple) * multiple, largest // multiple * multiple
    if first > last:
        assert budgets == ()
        return
    assert (budgets[0], budgets[-1]) == (first, last)
    for low, high in itertools.pairwise(budgets):
        assert high % multiple == 0
        assert low < high <= low + max(multiple, low / RUNGS)
    assert len(budgets) <= 2 + 2 * RUNGS * max(1, math.log2(last / first) + 1)


@pytest.mark.parametrize(
    ("num_rows", "fit"), [(0, 8), (1, 8), (8, 8), (9, 12), (12, 12), (19, 20), (20, 20), (21, None)]
)
def test_the_smallest_budget_that_holds_a_step(num_rows: int, fit: int | None) -> None:
    assert smallest_fit([8, 12, 20], num_rows) == fit


def test_no_budgets_hold_nothing() -> None:
    assert smallest_fit([], 0) is None


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ([], []),
        ([4, 4, 4], [[4, 4], [4]]),
        ([11, 1, 9, 12, 13], [[11], [1, 9], [12], [13]]),  # what is too large is alone, and ends the run before
        ([5, 5, 1], [[5, 5], [1]]),
    ],
)
def test_runs_are_as_long_as_fits_and_keep_the_order(sizes: list[int], runs: list[list[int]]) -> None:
    assert list(pack(sizes, lambda run: sum(run) <= 10)) == runs
