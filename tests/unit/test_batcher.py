"""The batcher: steps of one modality, within their limits, and nobody overtaken for ever."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.batcher import Batcher

MAX_ROWS, MAX_ITEMS = 10, 3


@dataclass(frozen=True)
class Item:
    number: int
    modality: str
    num_rows: int


queues = st.lists(st.tuples(st.sampled_from(["image", "video", "audio"]), st.integers(1, 14)), max_size=25).map(
    lambda found: [Item(number, *rest) for number, rest in enumerate(found)]
)


def batcher_of(items: list[Item]) -> Batcher[Item]:
    batcher: Batcher[Item] = Batcher(max_rows=MAX_ROWS, max_items=MAX_ITEMS)
    for item in items:
        batcher.add(item)
    return batcher


def steps_of(batcher: Batcher[Item]) -> list[list[Item]]:
    steps = []
    while step := batcher.take():
        steps.append(step)
    return steps


def rows_by_step(*sizes: int) -> list[list[int]]:
    items = [Item(number, "image", num_rows) for number, num_rows in enumerate(sizes)]
    return [[item.num_rows for item in step] for step in steps_of(batcher_of(items))]


def test_nothing_waiting_is_no_step() -> None:
    assert batcher_of([]).take() == []


def test_one_item_does_not_wait_for_others() -> None:
    assert rows_by_step(1) == [[1]]


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ((5, 5, 5), [[5, 5], [5]]),
        ((5, 6), [[5], [6]]),
        ((1, 1, 1, 1), [[1, 1, 1], [1]]),
        ((14, 1), [[14], [1]]),
        ((1, 14, 1), [[1], [14], [1]]),
    ],
    ids=str,
)
def test_steps_keep_to_rows_and_items(sizes: tuple[int, ...], steps: list[list[int]]) -> None:
    assert rows_by_step(*sizes) == steps


def test_the_first_that_does_not_fit_closes_the_step() -> None:
    """Else the small ones behind it would overtake it, again and again."""
    assert rows_by_step(6, 9, 1, 1) == [[6], [9, 1], [1]]


def test_another_modality_is_passed_over_and_keeps_its_place() -> None:
    items = [Item(0, "image", 1), Item(1, "video", 1), Item(2, "image", 1), Item(3, "video", 1)]
    assert steps_of(batcher_of(items)) == [[items[0], items[2]], [items[1], items[3]]]


def test_what_comes_later_joins_the_end() -> None:
    batcher = batcher_of([Item(0, "image", 6), Item(1, "image", 6)])
    batcher.take()
    batcher.add(Item(2, "image", 1))
    assert [item.number for item in batcher.take()] == [1, 2]


def test_what_is_discarded_is_in_no_step() -> None:
    items = [Item(number, "image", 1) for number in range(3)]
    batcher = batcher_of(items)
    batcher.discard(items[1])
    assert batcher.take() == [items[0], items[2]]
    batcher.discard(items[0])
    assert len(batcher) == 0


def test_length_is_what_waits() -> None:
    batcher = batcher_of([Item(0, "image", 6), Item(1, "image", 6)])
    assert len(batcher) == 2
    batcher.take()
    assert len(batcher) == 1


@given(queues)
def test_every_item_is_in_one_step(items: list[Item]) -> None:
    taken = [item for step in steps_of(batcher_of(items)) for item in step]
    assert sorted(taken, key=lambda item: item.number) == items


@given(queues)
def test_a_step_keeps_its_limits(items: list[Item]) -> None:
    for step in steps_of(batcher_of(items)):
        assert len({item.modality for item in step}) == 1
        assert len(step) <= MAX_ITEMS
        assert len(step) == 1 or sum(item.num_rows for item in step) <= MAX_ROWS


@given(queues)
def test_a_modality_is_first_in_first_out(items: list[Item]) -> None:
    taken = [item for step in steps_of(batcher_of(items)) for item in step]
    for modality in ("image", "video", "audio"):
        numbers = [item.number for item in taken if item.modality == modality]
        assert numbers == sorted(numbers)


@given(queues)
def test_a_step_takes_all_that_fits(items: list[Item]) -> None:
    """What is left of the step's modality begins with one that did not fit."""
    batcher = batcher_of(items)
    left = list(items)
    while step := batcher.take():
        left = [item for item in left if item not in step]
        following = next((item for item in left if item.modality == step[0].modality), None)
        is_full = len(step) == MAX_ITEMS
        assert following is None or is_full or sum(item.num_rows for item in (*step, following)) > MAX_ROWS


@given(queues, queues)
def test_the_oldest_is_in_the_next_step_whoever_comes(items: list[Item], arrivals: list[Item]) -> None:
    """So an item with n before it waits for at most n steps."""
    batcher = batcher_of(items)
    waiting = list(items)
    coming = [Item(100 + item.number, item.modality, item.num_rows) for item in arrivals]
    while waiting:
        step = batcher.take()
        assert waiting[0] in step
        waiting = [item for item in waiting if item not in step]
        if coming:
            batcher.add(coming.pop())
