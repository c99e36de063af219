"""The plan of device memory: its arithmetic, its order, and what becomes of a plan that does not come true."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from producer.errors import MemoryPlanError, UnsupportedModelError
from producer.runner.memory import CaptureFailedError, MemoryPlan, plan_memory

MIB = 1 << 20


@dataclass
class FakeMemory:
    """A device of 1000 MiB of which others hold 100 and the weights 200.

    Not reproduced: fragments, PyTorch's cache, other processes that come and go, and garbage that is collected late.
    """

    total_bytes: int = 1000 * MIB
    held: dict[str, int] = field(default_factory=lambda: {"others": 100 * MIB, "weights": 200 * MIB})
    activation_bytes: int = 50 * MIB

    def used_bytes(self) -> int:
        return sum(self.held.values())

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        return self.activation_bytes


class FakeGraphs:
    """Takes `takes` bytes at its first capture, `then` at its second, and keeps `keeps` when it is cleared.

    Not reproduced: graphs, and all else that they do. `breaks` names the call that fails, and its turn.
    """

    def __init__(self, memory: FakeMemory, log: list[str], takes: int, then: int = -1, keeps: int = 0) -> None:
        self._memory = memory
        self._log = log
        self._takes = [takes, takes if then < 0 else then]
        self._keeps = keeps
        self.breaks: tuple[str, int] = ("", 0)

    def rehearse(self) -> None:
        self._do("rehearse")

    def capture(self) -> None:
        self._do("capture")
        self._memory.held["graphs"] = self._takes[self._log.count("capture") - 1]

    def clear(self) -> None:
        self._log.append("clear")
        self._memory.held["graphs"] = 0
        self._memory.held["kept"] = self._keeps

    def _do(self, what: str) -> None:
        self._log.append(what)
        if self.breaks == (what, self._log.count(what)):
            self._memory.held["graphs"] = 0
            raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")


@dataclass
class Start:
    """One start of a device whose graphs take `graph_bytes`."""

    memory: FakeMemory = field(default_factory=FakeMemory)
    log: list[str] = field(default_factory=list)

    def plan(self, graphs: FakeGraphs | None, limit_bytes: int = 0) -> MemoryPlan:
        def largest_step() -> None:
            self.log.append("step")

        taken: Any = graphs
        return plan_memory(self.memory, taken, largest_step, weights_bytes=200 * MIB, limit_bytes=limit_bytes)

    def graphs(self, *sizes: int, keeps: int = 0) -> FakeGraphs:
        return FakeGraphs(self.memory, self.log, *(size * MIB for size in sizes), keeps=keeps * MIB)


def test_graphs_are_captured_on_trial_given_back_and_captured_for_good() -> None:
    start = Start()
    plan = start.plan(start.graphs(30))
    assert start.log == ["step", "step", "rehearse", "capture", "clear", "capture"]
    assert start.memory.held["graphs"] == 30 * MIB
    assert plan.agrees
    assert plan.parts == {
        "weights": 200 * MIB,
        "activations": 50 * MIB,
        "graphs_reserved": 30 * MIB,
        "graphs": 30 * MIB,
        "rest": (1000 - 300 - 50 - 30) * MIB,
    }


def test_without_graphs_nothing_is_reserved_for_them() -> None:
    start = Start()
    plan = start.plan(None)
    assert start.log == ["step", "step"]
    assert (plan.graph_bytes, plan.captured_bytes, plan.kept_bytes) == (0, 0, 0)
    assert (plan.rest_bytes, plan.agrees) == (650 * MIB, True)


@pytest.mark.parametrize(
    ("reserved", "captured", "agrees"),
    [
        (10, 10, True),
        (10, 18, True),  # 8 MiB, the larger here
        (10, 2, True),
        (10, 19, False),
        (10, 1, False),
        (500, 510, True),  # 2 %
        (500, 490, True),
        (500, 511, False),
        (500, 489, False),
    ],
)
def test_reserved_and_captured_agree_within_8_mib_or_2_percent(
    reserved: int, captured: int, agrees: bool, caplog: pytest.LogCaptureFixture
) -> None:
    start = Start()
    with caplog.at_level("INFO", "producer.runner.memory"):
        plan = start.plan(start.graphs(reserved, captured))
    assert plan.difference_bytes == (captured - reserved) * MIB
    assert plan.agrees == agrees
    (record,) = caplog.records
    assert record.levelname == ("INFO" if agrees else "WARNING")
    assert f"graphs {captured} MiB (reserved {reserved} MiB), left {650 - reserved} MiB" in record.getMessage()


def test_what_the_trial_keeps_is_said_and_counted_as_the_graphs() -> None:
    """It was measured with them, and is there for them: the second capture does not take it again."""
    start = Start()
    plan = start.plan(start.graphs(30, 25, keeps=5))
    assert (plan.graph_bytes, plan.kept_bytes, plan.captured_bytes) == (30 * MIB, 5 * MIB, 30 * MIB)


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [(0, 1000), (400, 500), (900, 1000), (2000, 1000)],  # beside the 100 of others; no more than there is
)
def test_the_limit_is_for_this_process_alone(limit: int, allowed: int) -> None:
    plan = Start().plan(None, limit * MIB)
    assert plan.limit_bytes == allowed * MIB
    assert plan.rest_bytes == (allowed - 300 - 50) * MIB


def test_a_plan_that_just_fits() -> None:
    start = Start()
    assert start.plan(start.graphs(30), 280 * MIB).rest_bytes == 0


def test_a_plan_that_does_not_fit_stops_before_the_second_capture_with_all_numbers() -> None:
    start = Start()
    said = (
        "the encoder does not fit into device memory: of 379 MiB that it may use, 300 MiB are taken (200 MiB of them"
        " by its weights), a step of the largest size takes 50 MiB and graphs take 30 MiB; 1 MiB are lacking."
        " Lower max_batch_rows, max_item_rows or graph_rows"
    )
    with pytest.raises(MemoryPlanError, match=f"^{re.escape(said)}$") as caught:
        start.plan(start.graphs(30), 279 * MIB)
    assert isinstance(caught.value, UnsupportedModelError)  # a start that ends with one line
    assert start.log[-2:] == ["capture", "clear"]
    assert start.memory.held["graphs"] == 0


@pytest.mark.parametrize("breaks", [("rehearse", 1), ("capture", 1), ("capture", 2)], ids=str)
def test_a_failed_capture_is_told_in_one_line_after_its_memory_was_given_back(
    breaks: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start()
    graphs = start.graphs(30)
    graphs.breaks = breaks
    used_bytes = start.memory.used_bytes

    def measure() -> int:
        start.log.append("measure")
        return used_bytes()

    monkeypatch.setattr(start.memory, "used_bytes", measure)
    said = "^RuntimeError: CUDA error: operation not permitted when stream is capturing$"
    with pytest.raises(CaptureFailedError, match=said) as caught:
        start.plan(graphs)
    assert start.log[-2:] == [breaks[0], "measure"]
    assert caught.value.__context__ is None  # it would keep the frames, and with them tensors


def test_a_step_of_the_largest_size_that_finds_no_room_is_a_plan_that_does_not_fit() -> None:
    def largest_step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 900.00 MiB")

    with pytest.raises(MemoryPlanError, match=r"does not fit into device memory: .*1000 MiB.*200 MiB"):
        plan_memory(FakeMemory(), None, largest_step, weights_bytes=200 * MIB)
