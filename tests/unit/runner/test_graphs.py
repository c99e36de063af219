"""Captured graphs, emulated on the host: what is captured, what is moved, and that a replay equals eager execution."""

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.kit.emulated import Recorder, attention_that_leaves_tails
from tests.kit.engines import MAX_ITEMS, SIDE, Engine, embeddings, engine

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # torch's, of received bytes
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
]

MAX = 4
"""Items of a graph of a small encoder; its budgets are multiples of it."""


class LoggingRecorder(Recorder):
    """Writes down the rows of what is rehearsed and recorded, and fails at recording `fail_at`."""

    def __init__(self, fail_at: int = -1) -> None:
        self.log: list[tuple[str, int]] = []
        self.collects: list[bool] = []
        self.num_clears = 0
        self._fail_at = fail_at

    def rehearse(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        found = super().rehearse(function)
        self.log.append(("rehearse", len(found)))
        return found

    def record(self, function: Callable[[], torch.Tensor]) -> Any:
        self.collects.append(gc.isenabled())
        if len(self.recorded) == self._fail_at:
            raise RuntimeError("CUDA error: out of memory")
        self.log.append(("record", len(function())))
        return super().record(function)

    def clear(self) -> None:
        self.num_clears += 1

    @property
    def recorded(self) -> list[int]:
        return [rows for what, rows in self.log if what == "record"]


def graphs_of(model: Any, *, largest: int = 16, recorder: Recorder | None = None, capture: bool = True) -> Any:
    from producer.runner.graphs import EncoderGraphs

    made = EncoderGraphs(
        model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        smallest=4,
        largest=largest,
        max_items=MAX,
        recorder=recorder or Recorder(),
    )
    if capture:
        made.capture()
    return made


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As in a step."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def fakes() -> Any:
    from tests.unit.runner import fake_encoder  # here, since it imports vLLM

    return fake_encoder


def replayed(graphs: Any, fakes: Any, items: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    loaded = graphs.load(fakes.joined(items), needs_of(graphs, items))
    found: list[torch.Tensor] = graphs.replay(loaded)
    return found


def needs_of(graphs: Any, items: Sequence[dict[str, Any]]) -> list[Any]:
    needs = [graphs.need(item, "image") for item in items]
    assert graphs.fits(needs)
    return needs


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


# Capture


def test_the_largest_budget_is_captured_first_and_each_is_rehearsed_before(fakes: Any) -> None:
    recorder = LoggingRecorder()
    graphs = graphs_of(fakes.OnePath(), recorder=recorder)
    assert graphs.budgets == (4, 8, 12, 16)
    assert recorder.log == [(what, rows) for rows in (16, 12, 8, 4) for what in ("rehearse", "record")]
    assert (graphs.captured_rows, graphs.num_graphs) == ([4, 8, 12, 16], 4)


def test_a_rehearsal_runs_all_and_leaves_nothing(fakes: Any) -> None:
    recorder = LoggingRecorder()
    graphs = graphs_of(fakes.TwoPaths(), recorder=recorder, capture=False)
    graphs.rehearse()
    assert recorder.log == [("rehearse", rows) for rows in (16, 12, 8, 4)] * 2
    assert (graphs.captured_rows, graphs._static, recorder.num_clears) == ([], {}, 1)


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_a_capture_that_fails_midway_leaves_nothing_captured(fakes: Any, fail_at: int) -> None:
    recorder = LoggingRecorder(fail_at)
    graphs = graphs_of(fakes.OnePath(), recorder=recorder, capture=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.capture()
    assert len(recorder.recorded) == fail_at
    assert (graphs.captured_rows, graphs.num_graphs, graphs._static, recorder.num_clears) == ([], 0, {}, 1)
    need = graphs.need(fakes.OnePath().item(0, 3), "image")
    assert graphs.why_not(need) == "too_large"


@pytest.mark.parametrize("fail_at", [-1, 2])
def test_garbage_is_not_collected_while_graphs_are_captured(fakes: Any, fail_at: int) -> None:
    recorder = LoggingRecorder(fail_at)
    graphs = graphs_of(fakes.OnePath(), recorder=recorder, capture=False)
    try:
        graphs.capture()
    except RuntimeError:
        assert fail_at >= 0
    assert recorder.collects
    assert not any(recorder.collects)
    assert gc.isenabled()


def test_a_second_capture_after_clearing_is_as_good(fakes: Any) -> None:
    """As after the trial."""
    model = fakes.OnePath()
    graphs = graphs_of(model)
    graphs.clear()
    assert (graphs.captured_rows, graphs._static) == ([], {})
    graphs.capture()
    item = model.item(1, 7)
    assert same(replayed(graphs, fakes, [item]), [model.expected(item)])


# Paths and axes


def test_each_path_is_captured_and_replayed_where_an_item_goes_it(fakes: Any) -> None:
    model = fakes.TwoPaths()
    graphs = graphs_of(model)
    assert {key: sorted(found) for key, found in graphs._captured.items()} == {
        ("whole", ()): [4, 8, 12, 16],
        ("crops", ()): [4, 8, 12, 16],
    }
    sizes = [(3, 0), (4, 9), (16, 16), (1, 0), (7, 1)]
    for seed, (rows, crops) in enumerate(sizes):
        item = model.item(seed, rows, crop_rows=crops)
        loaded = graphs.load(dict(item), needs_of(graphs, [item]))
        assert sorted(loaded.captured) == (["crops", "whole"] if crops else ["whole"])
        assert sum(num_rows for _, num_rows in loaded.graphs) == rows + crops
        assert same(graphs.replay(loaded), [model.expected(item)])
    items = [
        model.item(10 + seed, rows, crop_rows=crops) for seed, (rows, crops) in enumerate([(3, 0), (4, 9), (1, 0)])
    ]
    loaded = graphs.load(fakes.joined(items), needs_of(graphs, items))
    assert sum(num_rows for _, num_rows in loaded.graphs) == 17
    assert sorted(budget for budget, _ in loaded.graphs) == [8, 12]
    assert same(graphs.replay(loaded), [model.expected(item) for item in items])


def test_an_item_too_large_for_one_of_its_paths_has_no_graph(fakes: Any) -> None:
    model = fakes.TwoPaths()
    graphs = graphs_of(model)
    assert graphs.why_not(graphs.need(model.item(0, 3, crop_rows=17), "image")) == "too_large"
    assert graphs.why_not(graphs.need(model.item(0, 17, crop_rows=0), "image")) == "too_large"


def test_each_combination_of_axis_keys_has_graphs_of_its_own(fakes: Any) -> None:
    model = fakes.TwoAxes()
    graphs = graphs_of(model)
    combinations = list(itertools.product(*model.axes))
    assert list(graphs._captured) == [("default", keys) for keys in combinations]
    assert graphs.num_graphs == 16
    for turn in range(2):
        for seed, (depth, kind) in enumerate(combinations):
            items = [model.item(10 * turn + seed, rows, depth=depth, night=kind == "night") for rows in (3, 5)]
            needs = needs_of(graphs, items)
            assert {need.axis_keys for need in needs} == {(depth, kind)}
            loaded = graphs.load(fakes.joined(items), needs)
            assert loaded.captured["default"] is graphs._captured["default", (depth, kind)][8]
            assert same(graphs.replay(loaded), [model.expected(item) for item in items])


def test_items_of_other_axis_keys_share_no_replay(fakes: Any) -> None:
    model = fakes.TwoAxes()
    graphs = graphs_of(model)
    first, second = (graphs.need(model.item(0, 2, night=night), "image") for night in (0, 1))
    assert graphs.fits([first, first])
    assert not graphs.fits([first, second])


# Ingest and replay


def test_only_the_rows_of_the_budget_are_written_and_only_its_padding_zeroed(fakes: Any) -> None:
    """All budgets look at the same buffer, of which a small one's ingest leaves the rest as it is."""
    model = fakes.OnePath()
    graphs = graphs_of(model)
    pixels, output = graphs._static["default"]._buffers["pixels"], graphs._static["default"]._buffers[""]
    assert (len(pixels), len(output)) == (16, 16)
    for one in graphs._captured["default", ()].values():
        assert one.inputs["pixels"].data_ptr() == pixels.data_ptr()
        assert one.output.data_ptr() == output.data_ptr()
    pixels.fill_(77)
    output.fill_(77)
    items = [model.item(seed, rows) for seed, rows in enumerate((2, 3))]
    assert same(replayed(graphs, fakes, items), [model.expected(item) for item in items])
    assert torch.equal(pixels[:5], fakes.joined(items)["pixels"])
    assert not pixels[5:8].any()
    assert (pixels[8:] == 77).all()
    assert (output[8:] == 77).all()


@pytest.mark.parametrize("kind", ["OnePath", "TwoPaths", "Views"])
def test_embeddings_that_were_handed_out_never_change(fakes: Any, kind: str) -> None:
    model = getattr(fakes, kind)()
    graphs = graphs_of(model)
    items = [model.item(seed, rows) for seed, rows in enumerate((3, 16, 7, 1, 16, 3))]
    kept = [replayed(graphs, fakes, [item])[0] for item in items]
    assert same(kept, [model.expected(item) for item in items])


def test_a_graph_whose_rows_are_joined_afterwards_is_chosen_by_the_embeddings_rows(fakes: Any) -> None:
    model = fakes.Merged()
    graphs = graphs_of(model)
    for rows in (1, 4, 5, 16):
        item = model.item(rows, rows)
        assert same(replayed(graphs, fakes, [item]), [model.expected(item)])
    assert graphs.why_not(graphs.need(model.item(0, 17), "image")) == "too_large"


def test_inputs_that_are_read_after_the_replay_are_kept_though_the_slot_is_written_again(fakes: Any) -> None:
    model = fakes.TwoPaths()
    graphs = graphs_of(model)
    items = [model.item(seed, 4, crop_rows=4 * seed) for seed in range(2)]
    slot = {key: value.clone() for key, value in fakes.joined(items).items()}
    loaded = graphs.load(dict(slot), needs_of(graphs, items))
    for value in slot.values():
        value.zero_()
    assert same(graphs.replay(loaded), [model.expected(item) for item in items])


def test_a_model_that_reads_nothing_late_has_nothing_copied_for_it(fakes: Any) -> None:
    model = fakes.OnePath()
    graphs = graphs_of(model)
    item = model.item(0, 4)
    loaded = graphs.load(dict(item), needs_of(graphs, [item]))
    assert loaded.kwargs["pixels"] is item["pixels"]


@pytest.mark.parametrize("extra", [{"pixels": (17, 4)}, {"pixels": (8, 5)}, {"crops": (17, 4)}], ids=str)
def test_what_does_not_fit_after_all_is_told(fakes: Any, extra: dict[str, tuple[int, ...]]) -> None:
    model = fakes.TwoPaths()
    graphs = graphs_of(model)
    item = model.item(0, 8, crop_rows=8)
    misfit = {**item, **{name: torch.ones(shape) for name, shape in extra.items()}}
    assert graphs.load(misfit, needs_of(graphs, [item])) is None
    assert graphs.load(item, needs_of(graphs, [item])) is not None


def test_no_more_items_and_sequences_than_a_graph_takes(fakes: Any) -> None:
    model = fakes.OnePath()
    graphs = graphs_of(model)
    need = graphs.need(model.item(0, 1), "image")
    video = dataclasses.replace(need, num_sequences=MAX - 1)
    assert graphs.fits([need] * MAX)
    assert not graphs.fits([need] * (MAX + 1))
    assert graphs.fits([need, video])
    assert not graphs.fits([need, video, need])


# Real models


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "gemma3"])
def one(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with attention_that_leaves_tails(), engine(request.param, graph_rows=192) as made:
        yield made


def pictures(one: Engine, num_rows: int, seed: int) -> list[Any]:
    """Pictures of together `num_rows` rows, or a little less."""
    if one.family in SIDE:
        return [one.rows(num_rows, seed=seed)]
    items = [one.image(120, 120, seed=seed + number) for number in range(num_rows // 36)]
    assert all(item.num_rows == 36 for item in items)
    return items


def steps_of(one: Engine) -> Iterator[list[Any]]:
    """Steps that go over all budgets and back to the smallest each time, with several items, and videos."""
    budgets = one.graphs.captured_rows
    for seed, budget in enumerate([*budgets, *reversed(budgets)]):
        yield pictures(one, budget, seed=10 * seed)
        yield pictures(one, budgets[0] if seed % 2 else budget - 4 * (one.family in SIDE), seed=200 + 10 * seed)
    if one.family not in SIDE:
        return
    yield [one.rows(rows, seed=300 + rows) for rows in (16, 25, 4, 36, 20)]
    side = SIDE[one.family]
    yield [one.video(4, 4 * side, 4 * side, seed=1)]
    yield [one.video(16, 4 * side, 3 * side, seed=2), one.video(4, 3 * side, 5 * side, seed=3)]
    yield [one.rows(16, seed=4)]


def test_a_replay_equals_eager_execution_bit_for_bit(one: Engine) -> None:
    kept, count = [], 0
    for step in steps_of(one):
        outcomes = one.runner.launch(step).finish()
        wanted = [embeddings(one.eager.launch([item]).finish())[0] for item in step]
        kept.append((outcomes, wanted))
        count += len(step)
    assert all(same(outcomes, wanted) for outcomes, wanted in kept)  # all, after the last replay
    assert one.count("graph_hits_total") == count
    assert [
        budget for budget in one.graphs.captured_rows if not one.count("graph_replays_total", budget=str(budget))
    ] == []


def test_what_attention_left_in_the_tail_is_not_in_the_output(one: Engine) -> None:
    """Not even in the padding, which later layers and later replays might read."""
    one.runner.launch([one.image(224, 224, seed=1)]).finish()
    (graphs,) = one.graphs._captured.values()
    assert one.count("graph_replays_total", budget=str(min(graphs))) > 0
    assert graphs[min(graphs)].output.isfinite().all()


def test_all_budgets_share_the_large_buffers(one: Engine) -> None:
    (graphs,) = one.graphs._captured.values()
    for name in ("pixel_values", ""):
        whole = one.graphs._static["default"]._buffers[name]
        views = [found.inputs[name] if name else found.output for found in graphs.values()]
        assert {view.data_ptr() for view in views} == {whole.data_ptr()}
        assert max(map(len, views)) == len(whole) > min(map(len, views))


def test_an_ingest_writes_no_more_than_its_budget(one: Engine) -> None:
    smallest = one.graphs.captured_rows[0]
    (graphs,) = one.graphs._captured.values()
    whole = one.graphs._static["default"]._buffers["pixel_values"]
    rest = whole[len(graphs[smallest].inputs["pixel_values"]) :]
    rest.fill_(77)
    one.runner.launch(pictures(one, smallest, seed=0)).finish()
    assert len(rest)
    assert (rest == 77).all()


def test_what_no_graph_can_do_is_told(one: Engine) -> None:
    from producer.runner.inputs import on_host

    if one.family not in SIDE:
        assert one.graphs.modalities == ["image"]
        return

    def why_not(item: Any) -> str:
        return str(one.graphs.why_not(one.graphs.need(on_host(one.encoder.decode(item.inputs)), item.modality)))

    side = SIDE[one.family]
    largest = one.graphs.captured_rows[-1]
    assert why_not(one.rows(largest, seed=0)) == ""
    assert why_not(one.rows(largest + 4, seed=0)) == "too_large"
    assert why_not(one.video(2 * MAX_ITEMS, 2 * side, 2 * side, seed=0)) == ""  # two frames are one sequence
    assert why_not(one.video(2 * MAX_ITEMS + 2, 2 * side, 2 * side, seed=0)) == "too_many_sequences"


def test_an_eager_step_tells_how_it_comes_on(one: Engine) -> None:
    """Within each of the two blocks, also of classes that vLLM calls past their hooks."""
    ticks: list[int] = []
    one.encoder.on_progress(lambda: ticks.append(1))
    one.eager.launch([one.sample()]).finish()
    assert len(ticks) >= 4


def test_a_step_of_the_same_layout_brings_but_its_pixels(one: Engine) -> None:
    """And one of another layout, or of the same after another, brings all."""
    first, other = (pictures(one, num_rows, seed=0) for num_rows in one.graphs.captured_rows[:2])
    again = pictures(one, one.graphs.captured_rows[0], seed=1)
    (static,) = one.graphs._static.values()
    written: list[list[str]] = []
    fill = static._fill

    def watched(name: str, *rest: Any) -> None:
        written[-1].append(name)
        fill(name, *rest)

    static._fill = watched  # type: ignore[method-assign]
    for step in (other, first, again, other):
        written.append([])
        wanted = [embeddings(one.eager.launch([item]).finish())[0] for item in step]
        assert same(one.runner.launch(step).finish(), wanted)
    del static._fill
    _, all_of_first, pixels_only, all_of_other = map(set, written)
    assert pixels_only == {"pixel_values"}
    assert (pixels_only < all_of_first) is (one.family in SIDE)  # the others have nothing else
    assert all_of_other == all_of_first
