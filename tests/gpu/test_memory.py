"""The plan of device memory: what is reserved for graphs is what they take, and a trial leaves nothing behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from producer.errors import MemoryPlanError, UnsupportedModelError
from producer.metrics import Metrics
from producer.runner.memory import CudaMemory
from tests.gpu.report import report, reported
from tests.kit.engines import Engine, engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20
TOLERANCE_BYTES = 8 * MIB


@dataclass(frozen=True)
class Case:
    name: str
    graph_rows: int = 4096
    eager: bool = False
    compile: bool = False
    family: str = "qwen2_5_vl"
    backend: str = "FLASH_ATTN"
    device_memory_bytes: int = 0


CASES = (
    Case("graphs, several budgets"),
    Case("graphs, one budget", graph_rows=64),
    Case("eager", eager=True),
    Case("compiled, graphs, several budgets", compile=True),
    Case("compiled, graphs, one budget", compile=True, graph_rows=64),
    Case("compiled, eager", compile=True, eager=True),
    Case("the model's code has no graphs", family="minicpm_v4_6"),
    Case("the capture fails", backend="TORCH_SDPA"),
    Case("it does not fit", device_memory_bytes=64 * MIB),
)


@contextmanager
def started(case: Case) -> Iterator[tuple[Any, Engine]]:
    """The engine as the service makes it, and what makes it again under other settings."""
    from producer.decode import sample
    from producer.runner.engine import EngineSettings, start_engine

    with engine(case.family, backend=case.backend, compile=case.compile, capture=False) as one:
        samples = [one.prepare(sample(modality)) for modality in one.encoder.forms]

        def start(require_graphs: bool = False, metrics: Metrics | None = None) -> Any:
            settings = EngineSettings(
                eager=case.eager,
                require_graphs=require_graphs,
                graph_rows=case.graph_rows,
                graph_items=32,
                num_slots=3,
                slot_bytes=32 * MIB,
                max_batch_rows=16384,
                max_item_rows=16384,
                device_memory_bytes=case.device_memory_bytes,
            )
            return start_engine(one.encoder, samples, settings, metrics or Metrics())

        yield start, one


class Table:
    """The rows of `memory`; what an earlier run left in the same folder of reports stays, if it is not done again."""

    def __init__(self) -> None:
        self._rows = {row["case"]: row for row in reported("memory").get("memory", [])}

    def add(self, row: dict[str, Any]) -> None:
        """Reports at once, since what comes next may take too long."""
        self._rows[row["case"]] = row
        rows = [self._rows[case.name] for case in CASES if case.name in self._rows]
        report("memory", {"memory": rows, "cases": len(rows)})

    def show(self) -> None:
        for row in self._rows.values():
            numbers = (f"{name[:-6]} {value / MIB:.1f}" for name, value in row.items() if name.endswith("_bytes"))
            print(f"{row['case']}: {', '.join(numbers)} MiB; {row['outcome']}")


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    table = Table()
    yield table
    table.show()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_graphs_take_what_was_reserved(case: Case, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    from producer.runner import engine as module

    plans: list[Any] = []
    make_plan = module.plan_memory

    def recorded(*args: Any, **kwargs: Any) -> Any:
        plans.append(make_plan(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(module, "plan_memory", recorded)
    kept_bytes, outcome = 0, ""
    with started(case) as (start, one):
        try:
            runner = start()
        except MemoryPlanError as error:
            outcome = f"stopped: {error}"
        else:
            outcome = runner._why_no_graphs or "graphs"
            if outcome == "capture_failed":
                before_bytes = CudaMemory(one.encoder.device).used_bytes()
                with pytest.raises(UnsupportedModelError, match="graphs are required, and there are none: capture_f"):
                    start(require_graphs=True)
                kept_bytes = CudaMemory(one.encoder.device).used_bytes() - before_bytes
            runner.launch([one.sample()]).finish()
    plan = plans[-1] if plans else None
    table.add(
        {
            "case": case.name,
            "weights_bytes": plan.weights_bytes if plan else 0,
            "activation_bytes": plan.activation_bytes if plan else 0,
            "reserved_bytes": plan.graph_bytes if plan else 0,
            "captured_bytes": plan.captured_bytes if plan else 0,
            "difference_bytes": plan.difference_bytes if plan else 0,
            "kept_bytes": plan.kept_bytes + kept_bytes if plan else 0,
            "outcome": outcome,
        }
    )
    wanted = {
        "eager": "eager",
        "compiled, eager": "eager",
        "the model's code has no graphs": "unsupported_model",
        "the capture fails": "capture_failed",
    }.get(case.name, "graphs")
    if case.device_memory_bytes:
        assert outcome.startswith("stopped: the encoder does not fit into device memory: of ")
        return
    assert outcome == wanted
    assert plan is not None
    assert plan.weights_bytes > 0
    assert plan.activation_bytes > 0
    assert (plan.graph_bytes > 0) == (outcome == "graphs")
    assert abs(plan.captured_bytes - plan.graph_bytes) <= max(TOLERANCE_BYTES, 0.02 * plan.graph_bytes)
    assert plan.kept_bytes + kept_bytes <= TOLERANCE_BYTES
