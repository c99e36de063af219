"""The engine put together: which graphs a start has or why none, what it refuses, and what the encoder tells of itself.

On the host: the device, its memory and what is captured are stood for by small things where a test needs them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from producer.config import ServeConfig
from producer.errors import MemoryPlanError, UnsupportedModelError
from producer.metrics import Metrics
from tests.kit.emulated import attention_that_leaves_tails
from tests.kit.engines import Engine, embeddings, engine
from tests.unit.conftest import prepared, sample

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # torch's, of received bytes
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
]

MIB = 1 << 20


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with attention_that_leaves_tails(), engine("qwen2_5_vl", graph_rows=64) as made:
        yield made


def settings(**values: Any) -> Any:
    from producer.runner.engine import EngineSettings

    return EngineSettings(
        **{
            "eager": False,
            "require_graphs": False,
            "graph_rows": 128,
            "graph_items": 32,
            "num_slots": 3,
            "slot_bytes": MIB,
            "max_batch_rows": 256,
            "max_item_rows": 1,
            "device_memory_bytes": 0,
            **values,
        }
    )


def start(encoder: Any, metrics: Metrics, **values: Any) -> Any:
    from producer.runner.engine import start_engine

    return start_engine(encoder, [prepared(num_rows=100)], settings(**values), metrics)


def test_each_setting_of_the_engine_is_one_of_the_service() -> None:
    from producer.runner.engine import EngineSettings

    config = ServeConfig(model="m")
    assert [field.name for field in dataclasses.fields(EngineSettings) if not hasattr(config, field.name)] == []


@pytest.mark.parametrize(("eager", "why"), [(False, "no_device"), (True, "eager")])
def test_on_a_host_every_step_is_eager_and_says_why(one: Engine, metrics: Metrics, eager: bool, why: str) -> None:
    runner = start(one.encoder, metrics, eager=eager)
    item = one.rows(16, seed=1)
    (found,) = embeddings(runner.launch([item]).finish())
    assert torch.equal(found, embeddings(one.eager.launch([item]).finish())[0])
    assert sample(metrics, "graph_misses_total", reason=why) == 1
    assert sample(metrics, "graph_hits_total") == 0
    assert len(runner._ring) == 3
    assert all(slot.num_bytes == MIB for slot in runner._ring._slots)


@pytest.mark.parametrize(("eager", "why"), [(False, "no_device"), (True, "eager")])
def test_graphs_that_are_required_and_not_there_end_the_start(
    one: Engine, metrics: Metrics, eager: bool, why: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^graphs are required, and there are none: {why}$"):
        start(one.encoder, metrics, eager=eager, require_graphs=True)


# A device that is not there


class FakeMemory:
    """A device of 1000 MiB. It holds what `held` says. Not reproduced: everything that takes memory."""

    total_bytes = 1000 * MIB
    held: dict[str, int]

    def __init__(self, device: torch.device) -> None:
        FakeMemory.held = {"weights": 200 * MIB}

    def used_bytes(self) -> int:
        return sum(FakeMemory.held.values())

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        return 50 * MIB


class FakeGraphs:
    """Takes 30 MiB, or fails. Not reproduced: graphs."""

    modalities = ("image",)

    def __init__(self, error: Exception | None, budgets: Sequence[int]) -> None:
        self._error = error
        self.budgets = self.captured_rows = budgets
        self.num_graphs = len(budgets)

    def rehearse(self) -> None:
        pass

    def capture(self) -> None:
        if self._error is not None:
            raise self._error
        FakeMemory.held["graphs"] = 30 * MIB

    def clear(self) -> None:
        FakeMemory.held["graphs"] = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An encoder on a GPU that is not there; `steps` are the items of each step that it was given."""
    from vllm.multimodal.inputs import MultiModalKwargsItem

    from producer.runner import engine as module
    from producer.runner.slot_ring import SlotRing

    allocate = SlotRing.allocate
    monkeypatch.setattr(module, "CudaMemory", FakeMemory)
    monkeypatch.setattr(module, "CudaRecorder", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 250 * MIB)
    monkeypatch.setattr(SlotRing, "allocate", lambda count, size, device: allocate(count, size, torch.device("cpu")))

    def make(error: Exception | None = None, has_graphs: bool = True, budgets: Sequence[int] = (64, 128)) -> Any:
        encoder = SimpleNamespace(
            device=torch.device("cuda:0"),
            is_exact=False,
            takes_compact=False,
            weights_bytes=200 * MIB,
            steps=[],
            asked=[],
            decode=lambda inputs: MultiModalKwargsItem({}),
        )

        def launch(kwargs: Any) -> Any:
            raise AssertionError("not in these tests")

        def graphs(*asked: Any) -> Any:
            encoder.asked.append(asked)
            return FakeGraphs(error, budgets) if has_graphs else None

        encoder.embed, encoder.graphs = launch, graphs
        monkeypatch.setattr(
            module.StepRunner,
            "launch",
            lambda runner, items: encoder.steps.append(list(items)) or SimpleNamespace(finish=list),
        )
        return encoder

    return make


def planned(metrics: Metrics) -> dict[str, float]:
    """MiB by part."""
    counted = next(one for one in metrics.registry.collect() if one.name == "ec_producer_device_bytes")
    return {one.labels["part"]: one.value / MIB for one in counted.samples}


def test_a_device_has_graphs_within_its_plan(device: Callable[..., Any], metrics: Metrics) -> None:
    encoder = device()
    runner = start(encoder, metrics, require_graphs=True)
    assert (runner._graphs.num_graphs, runner._why_no_graphs) == (2, "")
    assert encoder.asked == [(128, 32, None)]
    parts = {"weights": 200, "activations": 50, "graphs_reserved": 30, "graphs": 30, "rest": 720, "held": 250}
    assert planned(metrics) == parts


def test_the_largest_step_is_of_as_many_rows_as_a_batch_or_an_item_may_have(
    device: Callable[..., Any], metrics: Metrics
) -> None:
    encoder = device()
    start(encoder, metrics, max_batch_rows=256)
    assert {len(step) for step in encoder.steps} == {2}  # of the sample's 100 rows
    encoder.steps.clear()
    start(encoder, metrics, max_batch_rows=50)
    assert {len(step) for step in encoder.steps} == {1}
    encoder.steps.clear()
    start(encoder, metrics, max_batch_rows=50, max_item_rows=300)
    assert {len(step) for step in encoder.steps} == {3}


def test_a_model_without_support_runs_eagerly(device: Callable[..., Any], metrics: Metrics) -> None:
    assert start(device(has_graphs=False), metrics)._why_no_graphs == "unsupported_model"
    with pytest.raises(UnsupportedModelError, match="there are none: unsupported_model"):
        start(device(has_graphs=False), metrics, require_graphs=True)


def test_a_model_whose_support_is_not_whole_is_loud_and_runs_eagerly(
    device: Callable[..., Any], metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = device()
    encoder.graphs = lambda *asked: (_ for _ in ()).throw(AttributeError("no vision_config"))
    assert start(encoder, metrics)._why_no_graphs == "unsupported_model"
    assert "NO GRAPHS: the model's support for them fails with AttributeError: no vision_config" in caplog.text


def test_no_budget_is_no_graph(device: Callable[..., Any], metrics: Metrics) -> None:
    """As with a `graph_rows` below the model's smallest item."""
    with pytest.raises(UnsupportedModelError, match="graphs are required, and there are none"):
        start(device(budgets=()), metrics, require_graphs=True)


def test_eager_asks_for_no_graphs_and_plans_all_the_same(device: Callable[..., Any], metrics: Metrics) -> None:
    encoder = device()
    runner = start(encoder, metrics, eager=True)
    assert (runner._graphs, runner._why_no_graphs, encoder.asked) == (None, "eager", [])
    parts = {"weights": 200, "activations": 50, "graphs_reserved": 0, "graphs": 0, "rest": 750, "held": 250}
    assert planned(metrics) == parts


def test_a_failed_capture_is_loud_and_leaves_eager_steps(
    device: Callable[..., Any], metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    runner = start(device(RuntimeError("operation not permitted")), metrics)
    assert (runner._graphs, runner._why_no_graphs) == (None, "capture_failed")
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("NO GRAPHS: their capture failed, so every step runs eagerly: RuntimeError: operation not p")
    assert planned(metrics)["graphs"] == planned(metrics)["graphs_reserved"] == 0


def test_a_failed_capture_ends_a_start_that_requires_graphs(device: Callable[..., Any], metrics: Metrics) -> None:
    with pytest.raises(UnsupportedModelError, match="graphs are required, and there are none: capture_failed"):
        start(device(RuntimeError("operation not permitted")), metrics, require_graphs=True)


def test_what_does_not_fit_ends_the_start_whether_graphs_are_required_or_not(
    device: Callable[..., Any], metrics: Metrics
) -> None:
    with pytest.raises(MemoryPlanError, match=r"of 279 MiB that it may use, .* 1 MiB are lacking"):
        start(device(), metrics, device_memory_bytes=279 * MIB)


def test_a_limit_that_is_kept_is_pytorchs_too(
    device: Callable[..., Any], metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: limits.append(part))
    start(device(), metrics)
    assert limits == []
    start(device(), metrics, device_memory_bytes=500 * MIB)
    assert limits == [0.5]


@pytest.mark.parametrize(("kind", "max_steps", "batch_rows"), [("cpu", 1, 512), ("cuda", 4, 2048)])
def test_only_a_device_is_given_several_steps_at_once_and_large_ones(
    kind: str, max_steps: int, batch_rows: int, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    from producer import app
    from producer.runner import engine as module

    found: list[Any] = []
    monkeypatch.setattr(module, "start_engine", lambda *given: found.append(given[2]) or SimpleNamespace(launch=None))
    encoder: Any = SimpleNamespace(device=torch.device(kind), on_progress=lambda tick: None)
    config = ServeConfig(model="m", steps_in_flight=4, graph_rows=2048, eager=True)
    stack: Any
    with ExitStack() as stack:
        loop = app._start_steps(config, encoder, [], None, metrics, stack)  # type: ignore[arg-type]
        assert (loop._max_steps, loop._batcher._max_rows) == (max_steps, batch_rows)
        stack.pop_all()
        assert loop.stop(30)
    assert found == [
        settings(
            num_slots=5,
            graph_rows=2048,
            eager=True,
            slot_bytes=32 * MIB,
            max_batch_rows=batch_rows,
            max_item_rows=16384,
        )
    ]


# What the encoder tells of itself


def test_the_attention_in_use_is_read_off_the_layers(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one.encoder._attention_backend() == "TORCH_SDPA"
    layer = next(module for module in one.encoder._model.modules() if hasattr(module, "attn_backend"))
    monkeypatch.setattr(layer, "attn_backend", SimpleNamespace(name="FLASHINFER"))
    assert one.encoder._attention_backend() == "FLASHINFER"


def test_weights_are_counted_off_the_model(one: Engine) -> None:
    model = one.encoder._model
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    assert one.encoder.weights_bytes == sum(tensors.values()) > 100_000


def test_progress_is_told_within_a_step(one: Engine) -> None:
    ticks: list[int] = []
    one.encoder.on_progress(lambda: ticks.append(1))
    one.eager.launch([one.rows(16, seed=1)]).finish()
    blocks = len(one.encoder._model.visual.blocks)
    assert len(ticks) >= blocks >= 2


def test_a_model_without_support_has_no_graphs(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one.encoder, "_model", torch.nn.Linear(1, 1))
    assert one.encoder.graphs(64, 32, None) is None


def test_budgets_begin_where_the_models_smallest_items_are(one: Engine) -> None:
    assert one.encoder.graphs(256, 16, None).budgets[:2] == (64, 80)
    assert one.encoder.graphs(256, 100, None).budgets == (100, 200)
