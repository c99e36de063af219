"""NaN of an earlier replay, in the memory that all graphs share, reaches no embedding of a later one."""

from typing import Any

import pytest
import torch

from producer.core import PreparedItem
from tests.gpu.report import report
from tests.kit.engines import SIDE, Engine, engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "TORCH_SDPA")
figures: dict[str, Any] = {"cases": 0, "leaked": 0, "by_family": {}}


@torch.inference_mode()
def poison(one: Engine, budget: int) -> None:
    """Replays a graph whose inputs are NaN where they are numbers: so are its intermediates and its output then, in
    the memory that the other graphs use too."""
    (graphs,) = one.graphs._captured.values()
    one.runner.launch(filling(one, budget, seed=0)).finish()
    captured = graphs[budget]
    for buffer in captured.inputs.values():
        if buffer.is_floating_point() and buffer.ndim:
            buffer.fill_(float("nan"))
    captured.graph.replay()
    assert captured.output.isnan().any()


def filling(one: Engine, num_rows: int, seed: int) -> list[PreparedItem]:
    """Items of so many rows together."""
    if one.family in SIDE:
        return [one.rows(num_rows, seed=seed)]
    image = one.image(224, 224, seed=seed)
    return [image] * (num_rows // image.num_rows)


def leaks(one: Engine) -> tuple[int, int]:
    """Small steps after poisoned large ones: how many embeddings, and how many of them are not finite."""
    cases = leaked = 0
    budgets = one.graphs.captured_rows
    for seed, budget in enumerate(budgets):
        poison(one, budgets[-1])
        poison(one, budget)
        less = max(4, budget - 8) if one.family in SIDE else max(budget // 2, budgets[0])
        step = filling(one, less, seed=seed)
        before = one.count("graph_misses_total", reason="not_finite")
        one.runner.launch(step).finish()
        leaked += int(one.count("graph_misses_total", reason="not_finite") - before)
        cases += len(step)
    return cases, leaked


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_stale_nan_leaks_nowhere(family: str, backend: str) -> None:
    try:
        with engine(family, backend=backend, graph_rows=2048) as one:
            used = one.encoder._attention_backend()
            cases, leaked = leaks(one)
            misses = sum(one.count("graph_misses_total", reason=why) for why in ("too_large", "too_many_sequences"))
            unguarded = unguarded_leaks(one)
    except Exception as error:
        figures["by_family"].setdefault(family, {})[backend] = {
            "not_captured": f"{type(error).__name__}: {error}"[:300]
        }
        report("nan", figures)
        if backend == "TORCH_SDPA":
            return  # it splits by lengths that it reads back, which no graph can
        raise
    figures["cases"] += cases
    figures["leaked"] += leaked
    figures["by_family"].setdefault(family, {})[backend] = {
        "used": used,
        "cases": cases,
        "leaked": leaked,
        "leaked_without_clearing": unguarded,
    }
    report("nan", figures)
    assert used == backend
    assert misses == 0
    assert leaked == 0


def unguarded_leaks(one: Engine) -> int:
    """The same where attention's tails are not cleared: what the clearing is for."""
    for module in one.encoder._model.modules():
        module._forward_hooks.clear()
    one.graphs.clear()
    one.graphs.capture()
    return leaks(one)[1]
