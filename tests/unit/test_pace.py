"""How long what waits will take, judged by what was finished."""

import pytest

from producer.pace import Pace


def test_too_few_items_say_nothing() -> None:
    pace = Pace()
    pace.begin(0.0)
    for second in range(1, 8):
        pace.finish(float(second))
    assert pace.seconds_for(100) == 0


def test_time_without_work_does_not_count() -> None:
    pace = Pace()
    for start in (0.0, 1000.0):
        pace.begin(start)
        for second in range(1, 11):
            pace.finish(start + 2.0 * second)
    assert pace.seconds_for(3) == pytest.approx(6.0)


def test_items_that_come_together_are_evened_out() -> None:
    """Steps of 16 items, one in 4 s: 0.25 s an item, at whichever end of a step one looks."""
    pace = Pace()
    pace.begin(0.0)
    for step in range(1, 9):
        for _ in range(16):
            pace.finish(4.0 * step)
    assert pace.seconds_for(16) == pytest.approx(4.0)


def test_the_past_is_forgotten() -> None:
    pace = Pace()
    pace.begin(0.0)
    for second in range(1, 100):
        pace.finish(100.0 * second)
    for second in range(1, 65):
        pace.finish(9900.0 + second)
    assert pace.seconds_for(1) == pytest.approx(1.0)
