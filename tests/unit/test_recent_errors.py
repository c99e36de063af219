"""The ring of recent errors: bounded, newest first, and without anything that a client sent."""

from producer.recent_errors import RecentError, RecentErrors
from tests.unit.conftest import Clock


def test_equal_errors_are_one_that_moves_to_the_front(clock: Clock) -> None:
    errors = RecentErrors(clock=clock)
    errors.add("item", "INVALID_ARGUMENT", "MEDIA_UNREADABLE")
    errors.add("call", "NOT_FOUND", "NOT_IN_POOL")
    clock.now_s += 5
    errors.add("item", "INVALID_ARGUMENT", "MEDIA_UNREADABLE")
    assert errors.newest_first() == [
        RecentError(scope="item", code="INVALID_ARGUMENT", reason="MEDIA_UNREADABLE", count=2, last_s=1005.0),
        RecentError(scope="call", code="NOT_FOUND", reason="NOT_IN_POOL", count=1, last_s=1000.0),
    ]


def test_what_differs_in_anything_is_another(clock: Clock) -> None:
    errors = RecentErrors(clock=clock)
    for kind in (
        ("item", "INTERNAL", "A"),
        ("call", "INTERNAL", "A"),
        ("item", "UNAVAILABLE", "A"),
        ("item", "I", "B"),
    ):
        errors.add(*kind)
    assert [error.count for error in errors.newest_first()] == [1, 1, 1, 1]


def test_the_oldest_goes_when_there_are_too_many(clock: Clock) -> None:
    errors = RecentErrors(max_kinds=3, clock=clock)
    for number in range(100):
        errors.add("item", "INTERNAL", f"REASON_{number}")
    assert [error.reason for error in errors.newest_first()] == ["REASON_99", "REASON_98", "REASON_97"]
