"""Encoder steps: what is replayed and what is not, how it is counted, and what becomes of an embedding that is bad."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from producer.core import PreparedItem
from producer.errors import InternalError
from producer.metrics import Metrics
from producer.runner.slot_ring import SlotRing
from producer.wire.contract import Reason
from tests.kit.emulated import attention_that_leaves_tails
from tests.kit.engines import MAX_ITEMS, Engine, embeddings, engine
from tests.unit.conftest import sample

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # torch's, of received bytes
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
]

LARGEST = 128
SIDE = 28


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    """Qwen2.5-VL's encoder, with graphs of 64, 96 and 128 rows."""
    with attention_that_leaves_tails(), engine("qwen2_5_vl", graph_rows=LARGEST) as made:
        assert made.graphs.captured_rows == [64, 96, LARGEST]
        yield made


class Steps:
    """A runner of `one`'s, with counts of its own."""

    def __init__(self, one: Engine, *, exact: bool = False, graphs: Any = "its own", why_no_graphs: str = "") -> None:
        from producer.runner.steps import StepRunner

        self.metrics = Metrics()
        self.calls: list[int] = []
        self._embed = one.encoder.embed
        self.eager_is_bad = False
        self.runner = StepRunner(
            decode=one.encoder.decode,
            embed=self.embed,
            ring=SlotRing.allocate(2, 1 << 20, torch.device("cpu")),
            graphs=one.graphs if graphs == "its own" else graphs,
            why_no_graphs=why_no_graphs,
            exact=exact,
            metrics=self.metrics,
        )

    def embed(self, kwargs: Any) -> list[torch.Tensor]:
        found = self._embed(kwargs)
        self.calls.append(len(found))
        return [torch.full_like(one, float("inf")) for one in found] if self.eager_is_bad else found

    def run(self, *items: PreparedItem) -> list[torch.Tensor]:
        return embeddings(self.runner.launch(items).finish())

    @property
    def hits(self) -> float:
        return sample(self.metrics, "graph_hits_total")

    def misses(self) -> dict[str, float]:
        """By reason."""
        counted = next(
            family for family in self.metrics.registry.collect() if family.name == "ec_producer_graph_misses"
        )
        return {one.labels["reason"]: one.value for one in counted.samples if one.name.endswith("_total") and one.value}

    def replays(self) -> dict[str, float]:
        """By budget."""
        counted = next(one for one in self.metrics.registry.collect() if one.name == "ec_producer_graph_replays")
        return {one.labels["budget"]: one.value for one in counted.samples if one.name.endswith("_total")}

    def rows(self) -> tuple[float, float]:
        """Real, and padding."""
        real, padding = (sample(self.metrics, "graph_rows_total", kind=kind) for kind in ("real", "padding"))
        return real, padding


def alone(one: Engine, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
    """What the model's own code gives for each."""
    return [embeddings(one.eager.launch([item]).finish())[0] for item in items]


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))


# Hits


def test_items_share_replays_as_far_as_the_largest_graph_goes(one: Engine) -> None:
    steps = Steps(one)
    items = [one.rows(rows, seed=rows) for rows in (50, 60, 30, 16, 100)]
    assert same(steps.run(*items), alone(one, items))
    assert (steps.hits, steps.misses()) == (5, {})
    assert steps.replays() == {"128": 2, "64": 1}  # 50 + 60; 30 + 16; 100
    assert steps.rows() == (256, 18 + 18 + 28)


def test_an_item_without_a_graph_is_encoded_between_those_with_one(one: Engine) -> None:
    steps = Steps(one)
    items = [one.rows(rows, seed=rows) for rows in (30, 150, 140, 20)]
    assert same(steps.run(*items), alone(one, items))
    assert (steps.hits, steps.misses(), steps.calls) == (2, {"too_large": 2}, [2])


def test_items_of_two_modalities_share_no_replay(one: Engine) -> None:
    steps = Steps(one)
    items = [one.rows(16, seed=1), one.video(4, 4 * SIDE, 4 * SIDE, seed=2), one.video(4, 2 * SIDE, 4 * SIDE, seed=3)]
    assert same(steps.run(*items), alone(one, items))
    assert (steps.hits, steps.replays()) == (3, {"64": 2})


@pytest.mark.parametrize("graphs", ["its own", None], ids=["graphs", "eager"])
def test_items_that_a_model_does_not_take_in_one_call_share_none(
    one: Engine, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another modality though their fields have the same names, or of other fields."""
    item = one.rows(16, seed=1)
    for second, can_join in ((replace(item, modality="video"), True), (item, False)):
        monkeypatch.setattr("producer.runner.steps.can_join", lambda left, right, can_join=can_join: can_join)
        steps = Steps(one, graphs=graphs, why_no_graphs="eager")
        assert same(steps.run(item, second), alone(one, [item, item]))
        assert (steps.replays(), steps.calls) == (({"64": 2}, []) if graphs else ({}, [1, 1]))


def test_no_more_sequences_than_a_graph_takes_share_a_replay(one: Engine) -> None:
    steps = Steps(one)
    items = [one.rows(1, seed=seed) for seed in range(MAX_ITEMS + 1)]
    for found, wanted in zip(steps.run(*items), alone(one, items), strict=True):
        torch.testing.assert_close(found, wanted, atol=0.004, rtol=0)  # of four patches and many: some CPUs round so
    assert steps.replays() == {"64": 2}


# Misses, by reason


@pytest.mark.parametrize("why", ["eager", "no_device", "unsupported_model", "capture_failed"])
def test_without_graphs_their_absence_is_the_reason(one: Engine, why: str) -> None:
    steps = Steps(one, graphs=None, why_no_graphs=why)
    items = [one.rows(rows, seed=rows) for rows in (16, 30)]
    assert same(steps.run(*items), alone(one, items))
    assert (steps.hits, steps.misses(), steps.calls) == (0, {why: 2}, [2])
    assert (steps.rows(), steps.replays()) == ((0, 0), {})


def test_a_modality_without_graphs(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one.graphs._config, "modalities", ["image"])
    steps = Steps(one)
    items = [one.video(4, 4 * SIDE, 4 * SIDE, seed=1)]
    assert same(steps.run(*items), alone(one, items))
    assert steps.misses() == {"unsupported_modality": 1}


def test_an_item_of_too_many_frames(one: Engine) -> None:
    steps = Steps(one)
    items = [one.video(2 * MAX_ITEMS + 2, SIDE, SIDE, seed=1)]
    assert same(steps.run(*items), alone(one, items))
    assert steps.misses() == {"too_many_sequences": 1}


def test_inputs_that_do_not_fit_the_graph_after_all(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of models that cut a picture into tiles of a number that its rows do not tell."""
    monkeypatch.setattr("producer.runner.static_inputs._holds", lambda inputs, values: False)
    steps = Steps(one)
    items = [one.rows(rows, seed=rows) for rows in (16, 30)]
    assert same(steps.run(*items), alone(one, items))
    assert (steps.hits, steps.misses(), steps.calls) == (0, {"too_many_sequences": 2}, [2])
    assert (steps.rows(), steps.replays()) == ((0, 0), {})


# Exact


def test_exact_takes_one_item_at_a_time_and_replays_what_was_seen_to_be_equal(one: Engine) -> None:
    steps = Steps(one, exact=True)
    items = [one.rows(16, seed=1), one.rows(30, seed=2), one.rows(16, seed=3)]
    wanted = alone(one, items)
    assert same(steps.run(*items), wanted)
    assert steps.misses() == {"not_compared_yet": 2}
    assert (steps.calls, steps.replays()) == ([1, 1], {"64": 1})  # the third has the layout of the first
    assert same(steps.run(*items), wanted)
    assert (steps.misses(), steps.calls) == ({"not_compared_yet": 2}, [1, 1])
    assert steps.hits == 1 + 3


@pytest.fixture
def off_by_a_bit(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of one element of each replay of 96 rows."""
    replay = one.graphs.replay

    def wrong(loaded: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = replay(loaded)
        if [budget for budget, _ in loaded.graphs] == [96]:
            found[0].view(torch.int16)[-1, -1] ^= 1
        return found

    monkeypatch.setattr(one.graphs, "replay", wrong)


@pytest.mark.usefixtures("off_by_a_bit")
def test_a_layout_whose_replay_differs_by_one_bit_is_eager_for_ever(one: Engine) -> None:
    steps = Steps(one, exact=True)
    items = [one.rows(90, seed=1), one.rows(16, seed=2)]
    wanted = alone(one, items)
    for _ in range(3):
        assert same(steps.run(*items), wanted)
    assert steps.misses() == {"not_compared_yet": 2, "not_exact": 2}
    assert steps.replays() == {"64": 2}


@pytest.mark.usefixtures("off_by_a_bit")
def test_fast_does_not_compare(one: Engine) -> None:
    item = one.rows(90, seed=1)
    (found,) = Steps(one).run(item)
    assert (found != alone(one, [item])[0]).sum() == 1


def test_a_layout_is_shape_and_small_values(one: Engine) -> None:
    """Two pictures of as many rows and another grid, and videos, are compared each for itself."""
    steps = Steps(one, exact=True)
    video = one.video(4, 4 * SIDE, 2 * SIDE, seed=4)
    items = [one.image(4 * SIDE, 4 * SIDE, seed=1), one.image(2 * SIDE, 8 * SIDE, seed=2), video, video]
    assert same(steps.run(*items), alone(one, items))
    assert steps.misses() == {"not_compared_yet": 3}


def test_layouts_are_forgotten_the_oldest_first(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.runner.steps._MAX_LAYOUTS", 2)
    steps = Steps(one, exact=True)
    first, second, third = (one.rows(rows, seed=rows) for rows in (16, 20, 24))
    for item in (first, second, third, second, first):
        steps.run(item)
    assert len(steps.runner._equals_eager) == 2
    assert steps.misses() == {"not_compared_yet": 4}  # the first was forgotten


# Embeddings that are not finite


@pytest.fixture
def bad_replay(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second item of each replay has a NaN."""
    replay = one.graphs.replay

    def bad(loaded: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = replay(loaded)
        found[1][3, 5] = float("nan")
        return found

    monkeypatch.setattr(one.graphs, "replay", bad)


@pytest.mark.usefixtures("bad_replay")
def test_an_item_whose_replay_is_bad_is_encoded_again_and_no_other(
    one: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(one)
    items = [one.rows(rows, seed=rows) for rows in (16, 20, 24)]
    under_way = steps.runner.launch(items)
    assert steps.calls == []  # only once it was seen
    assert same(embeddings(under_way.finish()), alone(one, items))
    assert (steps.misses(), steps.calls) == ({"not_finite": 1}, [1])
    assert sample(steps.metrics, "non_finite_outputs_total") == 0
    assert "a replayed graph gave NaN or infinity where encoding eagerly did not" in caplog.text


@pytest.mark.usefixtures("bad_replay")
def test_an_item_that_is_bad_again_is_refused_and_no_other(one: Engine) -> None:
    steps = Steps(one)
    items = [one.rows(rows, seed=rows) for rows in (16, 20, 24)]
    steps.eager_is_bad = True
    first, second, third = steps.runner.launch(items).finish()
    wanted = alone(one, items)
    assert isinstance(first, torch.Tensor)
    assert isinstance(third, torch.Tensor)
    assert same([first, third], [wanted[0], wanted[2]])
    assert isinstance(second, InternalError)
    assert (second.reason, str(second)) == (Reason.NON_FINITE_OUTPUT, "the embedding holds NaN or infinity")
    assert sample(steps.metrics, "non_finite_outputs_total") == 1


def test_an_item_that_is_bad_eagerly_is_not_tried_twice(one: Engine) -> None:
    steps = Steps(one, graphs=None, why_no_graphs="eager")
    steps.eager_is_bad = True
    (outcome,) = steps.runner.launch([one.rows(16, seed=1)]).finish()
    assert isinstance(outcome, InternalError)
    assert (steps.calls, steps.misses()) == ([1], {"eager": 1})
    assert sample(steps.metrics, "non_finite_outputs_total") == 1


def test_what_one_item_leaves_behind_reaches_no_other(one: Engine) -> None:
    """NaN in all that the largest graph reads and gives, where the padding of the next replays will be."""
    steps = Steps(one)
    largest = one.graphs._captured["default", ()][LARGEST]
    steps.run(one.rows(LARGEST, seed=0))
    with torch.inference_mode():
        for buffer in largest.inputs.values():
            if buffer.is_floating_point() and buffer.ndim:
                buffer.fill_(float("nan"))
        largest.graph.replay()
    assert largest.output.isnan().any()
    items = [one.rows(rows, seed=rows) for rows in (16, 90)]
    assert same(steps.run(items[0]) + steps.run(items[1]), alone(one, items))
    assert steps.misses() == {}


# Waiting for a slot


def test_what_a_step_waits_for_its_slot_is_observed(one: Engine) -> None:
    class Read:
        """The device is slow to read what the slot held before."""

        def record(self) -> None: ...
        def synchronize(self) -> None:
            time.sleep(0.05)

    steps = Steps(one)
    steps.run(one.sample())
    assert sample(steps.metrics, "slot_wait_seconds_sum") < 0.05
    for slot in steps.runner._ring._slots:
        slot.event = Read()
    steps.run(one.sample())
    assert sample(steps.metrics, "slot_wait_seconds_count") == 2
    assert sample(steps.metrics, "slot_wait_seconds_sum") >= 0.05


def test_embeddings_that_are_neighbours_in_memory_are_copied_at_once() -> None:
    from producer.runner.steps import _to_host

    whole, other = torch.arange(24.0).view(6, 4), torch.ones(2, 4)
    parts = [whole[:1], whole[1:4], other, whole[4:], whole[:2]]
    found = list(_to_host(parts))
    assert same(found, parts)
    shared = [len(one.untyped_storage()) // one.itemsize for one in found]
    assert found[0].data_ptr() + found[0].nbytes == found[1].data_ptr()
    assert shared == [24, 24, 8, 24, 24]
