"""The budget of what is sent again, on a clock that a test moves."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from consumer_shim.budget import RetryBudget
from tests.unit.conftest import Clock


def taken(budget: RetryBudget) -> int:
    """How many tokens there are; none after that."""
    count = 0
    while budget.take():
        count += 1
    return count


def test_a_floor_is_there_at_the_start(clock: Clock) -> None:
    assert taken(RetryBudget(clock=clock)) == 10


def test_first_calls_bring_a_share(clock: Clock) -> None:
    budget = RetryBudget(clock=clock)
    taken(budget)
    for _ in range(100):
        budget.deposit()
    assert taken(budget) in (19, 20)


def test_the_floor_comes_back(clock: Clock) -> None:
    budget = RetryBudget(clock=clock)
    taken(budget)
    clock.now_s += 4.5
    assert taken(budget) == 4
    clock.now_s += 3600.0
    assert taken(budget) == 10


def test_time_alone_brings_no_more_than_the_floor(clock: Clock) -> None:
    budget = RetryBudget(clock=clock)
    for _ in range(100):
        budget.deposit()
    clock.now_s += 3600.0
    assert taken(budget) in (29, 30)


def test_calm_saves_up_to_a_bound(clock: Clock) -> None:
    budget = RetryBudget(most=15.0, clock=clock)
    for _ in range(1000):
        budget.deposit()
    assert taken(budget) == 15


def test_threads_take_no_token_twice(clock: Clock) -> None:
    budget = RetryBudget(floor=1000.0, most=1000.0, clock=clock)
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(taken(budget))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 1000


EVENTS = st.lists(st.just("first") | st.just("again") | st.floats(0.0, 20.0), max_size=200)


@given(EVENTS)
def test_whatever_happens_the_bound_holds(events: list[str | float]) -> None:
    clock = Clock()
    budget = RetryBudget(clock=clock)
    began_s, firsts, agains = clock.now_s, 0, 0
    for event in events:
        if isinstance(event, float):
            clock.now_s += event
        elif event == "first":
            budget.deposit()
            firsts += 1
        else:
            agains += budget.take()
        assert agains <= 10 + 0.2 * firsts + (clock.now_s - began_s) + 1e-6
