"""Towers whose operators are recorded: what they give, that their own code does not run, and how much is kept."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from producer.core import PreparedItem
from producer.runner.fused import recorded
from producer.runner.fused.recorded import RecordedTower
from tests.kit.engines import Engine, embeddings, engine

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # torch's, of received bytes
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
]

OFTEN = recorded._OFTEN
GRID = [[1, 2, 2]]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def one(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine(request.param, capture=False) as made:
        yield made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine is not to decide what is recorded."""
    monkeypatch.setattr(recorded, "_LONGEST_S", 60.0)


def steps_of(one: Engine) -> dict[str, list[list[PreparedItem]]]:
    """Steps of one layout each, of other media each time."""
    side = 28 if one.family != "qwen3_vl" else 32
    return {
        "one": [[one.image(side * 8, side * 8, seed)] for seed in range(OFTEN + 2)],
        "several": [
            [one.image(side * 9, side * 5, seed), one.image(side, side, seed), one.image(side * 9, side * 5, seed + 50)]
            for seed in range(OFTEN + 2)
        ],
        "video": [[one.video(4, side * 4, side * 3, seed=seed)] for seed in range(OFTEN + 2)],
    }


def test_a_recorded_step_gives_the_same_bit_for_bit_and_runs_no_code_of_the_tower(one: Engine) -> None:
    tower = next(module for module in one.encoder._model.modules() if isinstance(module.forward, RecordedTower))
    for name, steps in steps_of(one).items():
        for step in steps[:OFTEN]:
            one.eager.launch(step).finish()
        if not tower.forward.is_recordable:
            pytest.skip("vLLM's products on this CPU cannot be recorded")
        for step in steps[OFTEN:]:
            with mock.patch.object(tower.patch_embed, "forward", side_effect=AssertionError(name)):
                played = embeddings(one.eager.launch(step).finish())
            with mock.patch.object(tower.forward, "_layouts", OrderedDict()):
                own = embeddings(one.eager.launch(step).finish())
            assert all(map(torch.equal, played, own)), name


class Tower:
    """Doubles what it is given, and counts how often it is asked itself."""

    def __init__(self) -> None:
        self.num_calls = 0

    def forward(self, x: torch.Tensor, grid_thw: Any, *, encoder_metadata: Any = None) -> torch.Tensor:
        self.num_calls += 1
        return x * 2


def asked(tower: RecordedTower, times: int, num_patches: int = 4, **others: Any) -> list[torch.Tensor]:
    return [tower(torch.full((num_patches, 3), float(number)), GRID, **others) for number in range(times)]


@torch.inference_mode()
def test_what_comes_often_is_recorded_by_layout() -> None:
    own = Tower()
    tower = RecordedTower(own.forward)
    asked(tower, OFTEN)
    num_calls = own.num_calls
    assert [int(one[0, 0]) for one in asked(tower, 5)] == [0, 2, 4, 6, 8]
    assert own.num_calls == num_calls
    asked(tower, 2, num_patches=8)
    tower(torch.zeros(4, 3, dtype=torch.uint8), GRID)
    tower(torch.zeros(4, 3), [[1, 1, 4]])
    assert own.num_calls == num_calls + 4


@torch.inference_mode()
def test_a_grid_may_be_a_tensor() -> None:
    own = Tower()
    tower = RecordedTower(own.forward)
    asked(tower, OFTEN)
    num_calls = own.num_calls
    assert torch.equal(tower(torch.ones(4, 3), torch.tensor(GRID)), torch.full((4, 3), 2.0))
    assert own.num_calls == num_calls


@torch.inference_mode()
def test_steps_that_bring_what_is_made_of_their_grids_are_not_recorded() -> None:
    own = Tower()
    tower = RecordedTower(own.forward)
    asked(tower, 3 * OFTEN, encoder_metadata={})
    assert own.num_calls == 3 * OFTEN


@torch.inference_mode()
def test_a_long_step_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_LONGEST_S", 0.0)
    own = Tower()
    asked(RecordedTower(own.forward), 3 * OFTEN)
    assert own.num_calls == 3 * OFTEN


class Changing(Tower):
    """What it does depends on how often it did it, which no recording knows."""

    def forward(self, x: torch.Tensor, grid_thw: Any, *, encoder_metadata: Any = None) -> torch.Tensor:
        return super().forward(x, grid_thw) + self.num_calls


class Untraceable(Tower):
    """Cannot be recorded."""

    def forward(self, x: torch.Tensor, grid_thw: Any, *, encoder_metadata: Any = None) -> torch.Tensor:
        if torch.jit.is_tracing():
            raise RuntimeError("no\nmore")
        return super().forward(x, grid_thw)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [(Changing(), "gave something else: it is not used"), (Untraceable(), "steps cannot be recorded: no")],
)
@torch.inference_mode()
def test_what_cannot_be_recorded_runs_as_ever(own: Tower, sentence: str, caplog: pytest.LogCaptureFixture) -> None:
    tower = RecordedTower(own.forward)
    asked(tower, OFTEN)
    num_calls = own.num_calls
    asked(tower, 2 * OFTEN)
    assert own.num_calls == num_calls + 2 * OFTEN
    assert tower.is_recordable == isinstance(own, Changing)
    (said,) = caplog.messages  # once, not at every step from there on
    assert said.endswith(sentence)


@torch.inference_mode()
def test_few_layouts_are_kept_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_MAX_LAYOUTS", 2)
    own = Tower()
    tower = RecordedTower(own.forward)
    for num_patches in (1, 2, 1, 3):
        asked(tower, OFTEN, num_patches)
    num_calls = own.num_calls
    asked(tower, 1, 1)
    assert own.num_calls == num_calls
    asked(tower, 1, 2)
    assert own.num_calls == num_calls + 1
    assert len(tower._layouts) == 2
