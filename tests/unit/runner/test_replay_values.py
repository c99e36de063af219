"""What is prepared for a replay beside the pixels is prepared once for each layout, unless it depends on the pixels."""

from typing import Any

import pytest
import torch

from producer.runner import replay_values
from producer.runner.replay_values import ReplayValues

LARGE = 1000


class Model:
    """Counts how often it prepares; `reads` says whether what it prepares depends on the pixels."""

    def __init__(self, *, reads: bool = False) -> None:
        self.reads = reads
        self.num_calls = 0

    def prepare(self, kwargs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
        self.num_calls += 1
        ends = kwargs["grid"].cumsum(0)
        if self.reads:
            ends = ends + kwargs["pixels"][:2].sum()
        return {"pixels": kwargs["pixels"], "ends": ends, "absent": None}


def kwargs(*grid: int, fill: float = 0.0, rows: int = LARGE) -> dict[str, Any]:
    return {"grid": torch.tensor(grid), "pixels": torch.full((rows,), fill)}


def test_a_layout_is_prepared_once_and_pixels_are_those_of_the_call() -> None:
    model = Model()
    values = ReplayValues(model.prepare)
    first, _, first_key = values.get(kwargs(2, 3))
    again = kwargs(2, 3, fill=1.0)
    second, passed, key = values.get(again)
    assert model.num_calls == 1
    assert second["pixels"] is again["pixels"]
    assert second["ends"] is first["ends"]
    assert (passed, key) == ({"pixels": "pixels"}, first_key)
    assert second["absent"] is None


@pytest.mark.parametrize("other", [kwargs(3, 2), kwargs(2, 3, 0), kwargs(2, 3, rows=LARGE + 1)])
def test_another_layout_is_another(other: dict[str, Any]) -> None:
    model = Model()
    values = ReplayValues(model.prepare)
    _, _, key = values.get(kwargs(2, 3))
    found, _, other_key = values.get(other)
    assert key != other_key
    assert found["ends"].tolist() == other["grid"].cumsum(0).tolist()  # type: ignore[union-attr]


def test_nothing_is_remembered_where_the_pixels_are_read() -> None:
    model = Model(reads=True)
    values = ReplayValues(model.prepare)
    for fill in (1.0, 2.0, 3.0):
        found, passed, key = values.get(kwargs(2, 3, fill=fill))
        assert found["ends"].tolist() == [2 + 2 * fill, 5 + 2 * fill]  # type: ignore[union-attr]
        assert (passed, key) == ({}, None)


def test_arguments_that_are_no_tensors_are_prepared_each_time() -> None:
    model = Model()
    values = ReplayValues(model.prepare)
    for _ in range(2):
        assert values.get(kwargs(2, 3) | {"sizes": [1, 2]})[1:] == ({}, None)
    assert model.num_calls == 2


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_values, "_MAX_BYTES", 64)
    model = Model()
    values = ReplayValues(model.prepare)
    for size in range(1, 11):  # 16 bytes each
        values.get(kwargs(size, 1))
    assert len(values._entries) == 4
    values.get(kwargs(10, 1))
    assert model.num_calls == 10
    values.get(kwargs(1, 1))
    assert model.num_calls == 11
