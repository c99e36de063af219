"""Figures of a step, on an engine whose graphs are emulated; what counts as a wrong answer; and a variant's process."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_steps, gpu_timing
from bench.gpu_record import Record
from bench.gpu_step_ours import step_figures
from bench.gpu_timing import relative_error, times_for
from tests.kit.emulated import attention_that_leaves_tails
from tests.kit.engines import Engine, embeddings, engine
from tests.kit.processes import Service, ServiceError

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # pixels, only read

SIDE = 56


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with attention_that_leaves_tails(), engine("qwen2_5_vl", graph_rows=64) as found:
        yield found


def test_a_steps_figures_are_of_the_graph_that_takes_it(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timing, "REPLAYS", 5)
    items = [one.image(SIDE, SIDE, seed=seed) for seed in range(2)]
    exact = [embedding.float() for embedding in embeddings(one.eager.launch(items).finish())]
    found = step_figures(one.runner, items, SIDE, {(SIDE, 1): exact[1]})
    assert (found["rows"], found["budget"]) == (8, one.graphs.budgets[0])
    assert found["is_finite"]
    assert found["is_same_again"]
    assert 0 <= found["error"] < 0.05
    assert min(found[name] for name in ("replay_ms", "period_ms", "launch_ms", "step_ms")) > 0
    assert found["overhead_ms"] == pytest.approx(found["period_ms"] - found["replay_ms"])
    worse = step_figures(one.runner, items, SIDE, {(SIDE, 1): exact[1] * 2})
    assert worse["error"] == pytest.approx(0.5, abs=0.05)


def test_an_item_that_no_graph_takes_is_no_figure(one: Engine) -> None:
    items = [one.rows(one.graphs.budgets[-1] + 4, seed=1)]
    with pytest.raises(RuntimeError, match="too_large"):
        step_figures(one.runner, items, SIDE, {})


def test_the_error_is_that_of_the_pictures_that_have_a_reference() -> None:
    own = [torch.tensor([[3.0, 4.0]]), torch.tensor([[9.0, 9.0]]), torch.tensor([[1.0, 0.0]])]
    reference = {(8, 0): torch.tensor([[3.0, 3.0]]), (8, 2): torch.tensor([[1.0, 1.0]])}
    assert relative_error(own, 8, reference) == pytest.approx((2 / 20) ** 0.5)
    assert relative_error(own, 9, reference) is None


def test_what_takes_long_is_done_less_often() -> None:
    assert [times_for(ms) for ms in (0.0, 1.0, 40.0, 1000.0)] == [20, 20, 10, 5]


def steps(**changed: Any) -> dict[str, Any]:
    good = {"replay_ms": 1.0, "error": 0.0180, "is_finite": True, "is_same_again": True}
    return {
        "ours": {"settings": {"budgets": [64]}, "1x448": good | changed, "overhead_ms": 0.1},
        "peer": {"1x448": {"error_of_eager": 0.0178}},
    }


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"error": 0.0182}, "allowed is 1.02 times that"),
        ({"error": float("nan")}, "allowed is 1.02 times that"),
        ({"is_finite": False}, "NaN or infinity"),
        ({"is_same_again": False}, "another embedding later"),
        ({"error": None}, "no case of ours could be compared"),
    ],
)
def test_a_fast_wrong_answer_is_a_failure(changed: dict[str, Any], said: str) -> None:
    assert gpu_steps.wrong_steps(steps()) == []
    (failure,) = gpu_steps.wrong_steps(steps(**changed))
    assert said in failure


def test_no_case_at_all_is_a_failure_where_ours_was_to_be_measured() -> None:
    assert gpu_steps.wrong_steps({"ours": {"settings": {}}}) == ["step: there is no case of ours"]
    assert gpu_steps.wrong_steps({"peer": {}}) == []


def variant(folder: Path, code: str) -> Service:
    """A process in the place of `bench.gpu_step`: ready at once, then it does what `code` says."""
    start = (
        f"from pathlib import Path; import sys, time; folder = Path({str(folder)!r}); (folder / 'x.ready').touch()\n"
    )
    go = "while not (folder / 'x.go').exists(): time.sleep(0.01)\n"
    return Service(
        "gpu-x", [sys.executable, "-c", start + go + code], ready=(folder / "x.ready").exists, logs=folder, grace_s=1.0
    )


ROWS = [
    {"budgets": [64]},
    {"case": "1x448", "overhead_ms": 0.1, "replay_ms": 3.0},
    {"case": "1x896", "overhead_ms": 0.4, "replay_ms": 9.0},
    {"case": "1x1036", "overhead_ms": 0.2, "replay_ms": 12.0},
    {"case": "1x224", "overhead_ms": 0.9, "replay_ms": 1.0},
]


def write(rows: list[dict[str, Any]]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return f"(folder / 'x.jsonl').write_text({text!r})\n"


def test_rows_are_recorded_and_the_worst_overhead_with_them(tmp_path: Path) -> None:
    record = Record(tmp_path / "gpu.json", {})
    service = variant(tmp_path, write(ROWS))
    service.start()
    gpu_steps._measure(record, "x", service, tmp_path)
    assert record.get("step/x/settings") == {"budgets": [64]}
    assert record.get("step/x/1x896/replay_ms") == 9.0
    assert record.get("step/x/overhead_ms") == 0.4


def test_what_came_before_a_failure_is_kept(tmp_path: Path) -> None:
    record = Record(tmp_path / "gpu.json", {})
    service = variant(tmp_path, write(ROWS[:2]) + "print('no memory is left'); sys.exit(3)")
    service.start()
    with pytest.raises(ServiceError, match=r"(?s)ended with 3.*no memory is left"):
        gpu_steps._measure(record, "x", service, tmp_path)
    assert record.get("step/x/1x448/replay_ms") == 3.0


def test_one_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "MEASURE_S", 0.5)
    service = variant(tmp_path, write(ROWS[:2]) + "time.sleep(600)")
    service.start()
    try:
        with pytest.raises(ServiceError, match=r"not done after 0 s; 2 rows came"):
            gpu_steps._measure(Record(tmp_path / "gpu.json", {}), "x", service, tmp_path)
        assert service.wait_ended(10.0), "it is on the device while the next one measures"
    finally:
        service.stop()
