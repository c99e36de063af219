"""A side that is not loaded is let come to rest before the other is measured."""

from collections.abc import Iterator

import pytest

from bench import measure


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the process will have computed at each look; it stays at the last."""
    values: list[float] = []

    def looks() -> Iterator[float]:
        while values:
            yield values.pop(0) if len(values) > 1 else values[0]

    looking = looks()
    monkeypatch.setattr(measure, "cpu_seconds", lambda pids: next(looking))
    monkeypatch.setattr(measure, "REST_POLL_S", 0.01)
    return values


async def test_it_is_waited_for_until_it_rests(computed: list[float]) -> None:
    computed += [5.0, 5.5, 6.0, 6.1, 6.1, 7.0]
    await measure.rest([1])
    assert computed == [7.0]


async def test_one_that_never_rests_is_not_waited_for_for_ever(computed: list[float]) -> None:
    computed += range(1_000_000)
    await measure.rest([1], within_s=0.1)
    assert 2 <= 1_000_000 - len(computed) <= 12
