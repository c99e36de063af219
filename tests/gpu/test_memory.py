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
                device_memory_bytes=case.device_memory_bytes,
            )
            return start_engine(one.encoder, samples, settings, metrics or Metrics())

        yield start, one


@pytest.fixture(scope="module")
def rows() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    yield found
    earlier = [row for row in reported("memory").get("memory", []) if row["case"] not in {row["case"] for row in found}]
    found = sorted(found + earlier, key=lambda row: [case.name for case in CASES].index(row["case"]))
    print(f"{'case':36} {'weights':>8} {'activ.':>8} {'reserved':>9} {'captured':>9} {'differ':>7} {'kept':>6}  MiB")
    for row in found:
        numbers = (row[f"{name}_bytes"] / MIB for name in ("weights", "activation", "reserved", "captured"))
        print(f"{row['case']:36} {'{:8.1f} {:8.1f} {:9.1f} {:9.1f}'.format(*numbers)}", end=" ")
        print(f"{row['difference_bytes'] / MIB:7.1f} {row['kept_bytes'] / MIB:6.1f}  {row['outcome']}")
    report("memory", {"memory": found, "cases": len(found)})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_graphs_take_what_was_reserved(case: Case, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    from producer.runner import engine as module

    plans: list[Any] = []
    make_plan = module.plan_memory

    def recorded(*args: Any, **kwargs: Any) -> Any:
        plans.append(make_plan(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(module, "plan_memory", recorded)
    outcome = "graphs"
    with started(case) as (start, one):
        try:
            runner = start()
        except MemoryPlanError as error:
            runner, outcome = None, f"stopped: {error}"
        else:
            if case.name == "the capture fails":
                left = CudaMemory(one.encoder.device).used_bytes()
                with pytest.raises(UnsupportedModelError, match="graphs are required, and there are none: capture_f"):
                    start(require_graphs=True)
                assert CudaMemory(one.encoder.device).used_bytes() <= left
            outcome = runner._why_no_graphs or "graphs"
            runner.launch([one.sample()]).finish()
    plan = plans[-1] if plans else None
    row = {
        "case": case.name,
        "weights_bytes": plan.weights_bytes if plan else 0,
        "activation_bytes": plan.activation_bytes if plan else 0,
        "reserved_bytes": plan.graph_bytes if plan else 0,
        "captured_bytes": plan.captured_bytes if plan else 0,
        "difference_bytes": plan.difference_bytes if plan else 0,
        "kept_bytes": plan.kept_bytes if plan else 0,
        "outcome": outcome,
    }
    rows.append(row)
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
    assert plan.kept_bytes <= TOLERANCE_BYTES
