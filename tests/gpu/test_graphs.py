"""Graphs against eager execution: bit for bit in `exact`, as near to float32 as vLLM's own in `fast`."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu.report import report
from tests.kit.engines import MAX_ITEMS, SIDE, Engine, embeddings, engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3")
ANY_SIZE = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
MAX_ERROR_RATIO = 1.02
"""Noise of the comparison itself: which of two roundings is nearer is a matter of chance for each element."""


PARITY: dict[str, Any] = {"cases": 0, "mismatches": 0, "families": {}}


@pytest.fixture
def figures() -> Iterator[dict[str, Any]]:
    """Reported after each test, since what comes next may take too long."""
    yield PARITY
    report("parity", PARITY)


def steps_of(one: Engine) -> Iterator[list[Any]]:
    """Steps that go over all budgets: small, large and small again; several items; videos; what fits no budget."""
    if one.family not in SIDE:
        sizes = [(224, 224), (900, 500), (500, 900)]
        for seed, size in enumerate(sizes):
            yield [one.image(*size, seed=seed)]
        for count in (2, 5, 11, MAX_ITEMS):
            yield [one.image(*sizes[seed % 3], seed=10 + seed) for seed in range(count)]
        yield [one.image(*sizes[0], seed=0)]
        return
    budgets = one.graphs.budgets
    for seed, budget in enumerate(budgets):
        for num_rows in {budget, largest_with_sides(budget - 1)}:
            yield [one.rows(16, seed=seed)]
            yield [one.rows(num_rows, seed=1000 + seed)]
    yield [one.rows(16, seed=0)]
    draw = random.Random(0)
    for step in range(12):
        yield [one.rows(largest_with_sides(draw.randint(4, 500)), seed=2000 + step * 10 + k) for k in range(7)]
    side = SIDE[one.family]
    for step, (num_frames, height, width) in enumerate([(4, 4, 4), (16, 6, 5), (64, 4, 4), (8, 20, 20)]):
        yield [one.video(num_frames, height * side, width * side, seed=step)]
    yield [one.video(4, 4 * side, 5 * side, seed=7), one.video(8, 6 * side, 4 * side, seed=8)]
    yield [one.video(80, 4 * side, 4 * side, seed=9)]  # more frames than a graph takes
    yield [one.rows(budgets[-1] + 64, seed=3000)]  # more rows


def largest_with_sides(num_rows: int) -> int:
    """The largest number up to `num_rows` that is a picture's rows with sides of no more than 1 to 8."""
    return next(
        n for n in range(num_rows, 0, -1) if n / max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0) ** 2 <= 8
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_is_eager_bit_for_bit(family: str, figures: dict[str, Any]) -> None:
    with engine(family, fidelity="exact") as one:
        mismatches = cases = 0
        for step in steps_of(one):
            alone = [embeddings(one.eager.launch([item]).finish())[0] for item in step]
            for _ in range(2):  # the first compares the layout, the second may replay
                found = embeddings(one.runner.launch(step).finish())
                cases += len(found)
                mismatches += sum(not torch.equal(got, want) for got, want in zip(found, alone, strict=True))
        hits, compared, refused = (
            one.count("graph_hits_total"),
            *(one.count("graph_misses_total", reason=reason) for reason in ("not_compared_yet", "not_exact")),
        )
        figures["cases"] += cases
        figures["mismatches"] += mismatches
        figures["families"].setdefault(family, {})["exact"] = {
            "cases": cases,
            "mismatches": mismatches,
            "replayed": hits,
            "layouts": compared,
            "eager_for_exactness": refused,
        }
    assert mismatches == 0
    assert hits > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_is_as_near_to_float32_as_eager(family: str, figures: dict[str, Any]) -> None:
    with engine(family, dtype="float32", backend="TORCH_SDPA", capture=False) as reference:
        with_float32 = [embeddings(reference.eager.launch(step).finish()) for step in steps_of(reference)]
    with engine(family) as one:
        fast, eager, differ, cases, retained = Error(), Error(), 0, 0, []
        for step, wanted in zip(steps_of(one), with_float32, strict=True):
            outcomes = one.runner.launch(step).finish()
            by_graph, by_eager = embeddings(outcomes), embeddings(one.eager.launch(step).finish())
            retained.append((outcomes, by_graph))
            for got, own, want in zip(by_graph, by_eager, wanted, strict=True):
                fast.add(got, want)
                eager.add(own, want)
                differ += not torch.equal(got, own)
                cases += 1
        changed = sum(
            not torch.equal(kept, copy) for step, copies in retained for kept, copy in zip(step, copies, strict=True)
        )
        real, padding = (one.count("graph_rows_total", kind=kind) for kind in ("real", "padding"))
        figures["families"].setdefault(family, {})["fast"] = {
            "cases": cases,
            "differ_from_eager": differ,
            "changed_afterwards": changed,
            "rms_error": fast.rms,
            "rms_error_of_eager": eager.rms,
            "max_error": fast.largest,
            "max_error_of_eager": eager.largest,
            "replayed": one.count("graph_hits_total"),
            "padding": padding / (real + padding),
        }
        assert one.count("graph_hits_total") > 0.8 * cases
        if family in SIDE:
            assert one.count("graph_misses_total", reason="too_large") == 1
            assert one.count("graph_misses_total", reason="too_many_sequences") == 1
            assert sum(
                one.count("graph_replays_total", budget=str(budget)) > 0 for budget in one.graphs.budgets
            ) == len(one.graphs.budgets)
    assert changed == 0
    assert fast.rms <= MAX_ERROR_RATIO * eager.rms


class Error:
    """Of many embeddings against a reference."""

    def __init__(self) -> None:
        self._sum = self._count = self.largest = 0.0

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        difference = (got.double() - want.double()).abs()
        self._sum += float((difference**2).sum())
        self._count += difference.numel()
        self.largest = max(self.largest, float(difference.max()))

    @property
    def rms(self) -> float:
        return math.sqrt(self._sum / self._count)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_reads_nothing_back(family: str) -> None:
    """All sizes are known on the host: nothing waits for the device between a step's inputs and its replay."""
    with engine(family, graph_rows=1024) as one:
        items = [one.image(224, 224, seed=seed) for seed in range(3)]
        one.runner.launch(items).finish()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step = one.runner.launch(items)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert one.count("graph_hits_total") == 6
        assert len(embeddings(step.finish())) == 3


def test_a_step_is_launched_while_the_device_is_at_another() -> None:
    with engine("qwen2_5_vl", graph_rows=256) as one:
        items = [one.rows(64, seed=seed) for seed in range(4)]
        expected = [embeddings(one.runner.launch([item]).finish())[0] for item in items]
        torch.cuda._sleep(200_000_000)
        steps = [one.runner.launch([item]) for item in items[:2]]
        assert not steps[0]._done.query()
        assert all(torch.equal(embeddings(step.finish())[0], want) for step, want in zip(steps, expected, strict=False))


def test_company_changes_no_more_than_rounding() -> None:
    """In `fast` mode an item goes through whichever graph its step needs; what that changes is reported."""
    with engine("qwen2_5_vl", graph_rows=512) as one:
        items = [one.rows(num_rows, seed=num_rows) for num_rows in (4, 6, 8, 9, 10, 16)]
        others = [one.rows(10, seed=100 + seed) for seed in range(MAX_ITEMS - 1)]
        differences, largest, comparisons = 0, 0.0, 0
        for item in items:
            (alone,) = embeddings(one.runner.launch([item]).finish())
            for num_others in range(1, MAX_ITEMS, 3):
                for step, place in (([item, *others[:num_others]], 0), ([*others[:num_others], item], num_others)):
                    found = embeddings(one.runner.launch(step).finish())[place]
                    comparisons += 1
                    differences += not torch.equal(found, alone)
                    largest = max(largest, float((found.float() - alone.float()).abs().max()))
        scale = float(alone.float().abs().max())
        assert one.count("graph_misses_total", reason="too_large") == 0
    report(
        "company",
        {"comparisons": comparisons, "differences": differences, "largest_difference": largest, "scale": scale},
    )
    assert largest <= 2**-6 * scale
