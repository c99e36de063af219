"""Captured graphs of the encoder, on vLLM's `SupportsEncoderCudaGraph`: capture, ingest, replay.

All budgets of a path share their static inputs and their output, each as a view of the largest's, and all graphs share
one memory pool. So between an ingest and the copy of its replay's output nothing else may run: one thread, one stream.
"""

import gc
import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.utils.jsontree import json_map_leaves
from vllm.v1.worker.encoder_cudagraph_defs import ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG

from producer.runner.budgets import ladder, smallest_fit
from producer.runner.guard import clear_tails
from producer.runner.recorder import Graph, Recorder
from producer.runner.static_inputs import StaticInputs

logger = logging.getLogger(__name__)

DEFAULT_PATH = "default"
AxisKeys = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Need:
    """What one item takes of a graph."""

    num_rows: int  # of its embedding
    rows: Mapping[str, int]  # by path; 0 where the item does not go that way
    num_sequences: int  # a video's frames attend by themselves, as if they were images
    axis_keys: AxisKeys


@dataclass(frozen=True, slots=True)
class _Captured:
    """One graph and its tensors, views of those that its path's graphs share."""

    num_rows: int
    graph: Graph
    inputs: dict[str, torch.Tensor]
    output: torch.Tensor  # [num_rows, width]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Items whose inputs lie in the graphs' static buffers: to be replayed before anything else is loaded."""

    captured: dict[str, _Captured]  # by path
    rows: dict[str, int]
    kwargs: dict[str, Any]
    needs: Sequence[Need]

    @property
    def graphs(self) -> list[tuple[int, int]]:
        """Of the graphs that will be replayed: their rows, and how many of them are the items'."""
        return [(one.num_rows, self.rows[path]) for path, one in self.captured.items()]


class EncoderGraphs:
    """Owns the graphs and their buffers. For one thread; nothing is captured before `capture`."""

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        smallest: int,
        largest: int,
        max_items: int,
        recorder: Recorder,
    ) -> None:
        """Graphs for `smallest` to `largest` rows. The model's attention clears what it leaves in padding from here on.

        Args:
            model: vLLM's, one that implements `SupportsEncoderCudaGraph`.
            device: where it lies.
            dtype: of its weights.
            smallest: rows of the smallest budget.
            largest: rows of the largest budget.
            max_items: images, or frames of videos, in one replay.
            recorder: makes graphs of functions.
        """
        self._model = model
        self._device = device
        self._dtype = dtype
        self._max_items = max_items
        self._recorder = recorder
        self._config = model.get_encoder_cudagraph_config()
        own = type(model).postprocess_encoder_output
        self._reads_inputs_late = own is not SupportsEncoderCudaGraph.postprocess_encoder_output
        self.budgets = ladder(max(smallest, max_items), largest, multiple=max_items)
        clear_tails(model)
        self._captured: dict[tuple[str, AxisKeys], dict[int, _Captured]] = {}
        self._static: dict[str, StaticInputs] = {}  # by path
        self._outputs: dict[tuple[str, AxisKeys, int], torch.Tensor] = {}  # rehearsed; shapes without memory

    @property
    def modalities(self) -> list[str]:
        """What the model can replay."""
        return list(self._config.modalities)

    @property
    def captured_rows(self) -> list[int]:
        """Budgets of which there is at least one graph, ascending; empty until `capture` has succeeded."""
        return sorted({num_rows for graphs in self._captured.values() for num_rows in graphs})

    @property
    def num_graphs(self) -> int:
        return sum(map(len, self._captured.values()))

    def capture(self) -> None:
        """Captures every path, axis and budget, largest first; all of them or, where one fails, none.

        Raises:
            Exception: whatever the model or the device raises.
        """
        try:
            with torch.inference_mode(), _no_garbage_collection():
                for index, wanted in enumerate(self._wanted()):
                    self._capture_one(*wanted, rehearses=not index or wanted not in self._outputs)
        except BaseException:
            self.clear()
            raise

    def rehearse(self) -> None:
        """Runs all that `capture` records, so that nothing is done for the first time in a capture; to come before it.

        Raises:
            Exception: whatever the model or the device raises.
        """
        try:
            with torch.inference_mode():
                for wanted in self._wanted():
                    self._rehearse(wanted, self._bind(*wanted)[1])
        finally:
            self.clear()

    def clear(self) -> None:
        """Lets go of all graphs and buffers."""
        self._captured.clear()
        self._static.clear()
        self._recorder.clear()

    def need(self, kwargs: Mapping[str, Any], modality: str) -> Need:
        """What the one item in `kwargs`, which may lie on the host, takes."""
        (spec,) = self._model.get_encoder_cudagraph_item_specs(kwargs)
        axis_keys: AxisKeys = ()
        if self._config.capture_axes:
            axis_keys = self._model.select_encoder_cudagraph_items(kwargs, [0])[ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG]
        grid = kwargs.get(f"{modality}_grid_thw")
        return Need(
            num_rows=spec.output_tokens,
            rows={path: spec.get_path_output_tokens(path) for path in self._config.paths},
            num_sequences=1 if grid is None else int(grid[0][0]),
            axis_keys=axis_keys,
        )

    def why_not(self, need: Need) -> str:
        """Why no graph can do an item that needs this; "" where one can."""
        if need.num_sequences > self._max_items:
            return "too_many_sequences"
        return "" if self.fits([need]) else "too_large"

    def fits(self, needs: Sequence[Need]) -> bool:
        """Whether one replay, of one graph a path, can do all of these items."""
        return (
            sum(need.num_sequences for need in needs) <= self._max_items
            and all(need.axis_keys == needs[0].axis_keys for need in needs)
            and self._choose(needs) is not None
        )

    def load(self, kwargs: dict[str, Any], needs: Sequence[Need]) -> Loaded | None:
        """The ingest: moves the inputs of items that fit to static buffers; None if they do not.

        Args:
            kwargs: the model's, of the items of `needs`. Tensors are read by what is put on the current stream.
            needs: of each item.
        """
        captured = self._choose(needs)
        assert captured is not None
        if self._config.capture_axes:
            kwargs = self._model.select_encoder_cudagraph_items(kwargs, list(range(len(needs))))
            kwargs.pop(ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG)
        if not all(self._static[path].fill(one.inputs, one.num_rows, kwargs) for path, one in captured.items()):
            return None
        if self._reads_inputs_late:
            kwargs = json_map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, kwargs)
        rows = {path: sum(need.rows[path] for need in needs) for path in captured}
        return Loaded(captured, rows, kwargs, needs)

    def replay(self, loaded: Loaded) -> list[torch.Tensor]:
        """Embeddings of the items, one `[num_rows, width]` tensor each, of a copy of the graphs' output."""
        outputs = {}
        for path, one in loaded.captured.items():
            one.graph.replay()
            outputs[path] = one.output.clone()  # one copy for all items: the next replay overwrites it
        num_items = len(loaded.needs)
        embeddings: dict[int, torch.Tensor] = {}
        self._model.postprocess_encoder_output(
            outputs,
            list(range(num_items)),
            [need.num_rows for need in loaded.needs],
            embeddings,
            clone=False,  # not every model does it where it is told to
            batch_mm_kwargs=loaded.kwargs,
        )
        return [embeddings[index] for index in range(num_items)]

    def _wanted(self) -> Iterator[tuple[str, AxisKeys, int]]:
        for path, policy in self._config.paths.items():
            budgets = self.budgets
            if policy.min_token_budget is not None:
                multiple = min(self._max_items, policy.min_token_budget)
                budgets = ladder(policy.min_token_budget, self.budgets[-1], multiple=multiple)
            for budget in reversed(budgets):
                for axis_keys in itertools.product(*self._config.capture_axes):
                    yield path, axis_keys, budget

    def _bind(
        self, path: str, axis_keys: AxisKeys, budget: int
    ) -> tuple[dict[str, torch.Tensor], Callable[[], torch.Tensor]]:
        """Static inputs for a graph, and the encoder on them."""
        values = self._model.prepare_encoder_cudagraph_capture_inputs(
            budget, self._max_items, self._max_items, self._device, self._dtype, path, axis_keys
        ).values
        if path not in self._static:
            self._static[path] = self._make_static(path)
        static = self._static[path]
        inputs = {name: static.share(name, value) for name, value in values.items() if value is not None}
        absent = {name: None for name, value in values.items() if value is None}
        return inputs, lambda: self._model.encoder_cudagraph_forward({**inputs, **absent}, path=path)

    def _rehearse(self, wanted: tuple[str, AxisKeys, int], forward: Callable[[], torch.Tensor]) -> None:
        self._outputs[wanted] = self._recorder.rehearse(forward).to("meta")

    def _capture_one(self, path: str, axis_keys: AxisKeys, budget: int, *, rehearses: bool) -> None:
        inputs, forward = self._bind(path, axis_keys, budget)
        if rehearses:  # the first one always: what libraries keep for the stream must not come from the graphs' memory
            self._rehearse((path, axis_keys, budget), forward)
        found = self._outputs[path, axis_keys, budget]
        graphs = self._captured.setdefault((path, axis_keys), {})
        num_rows = min(len(found), budget)  # a model may join rows of its graph's output afterwards
        if num_rows not in graphs:  # where items have a fixed size, the next larger budget holds as many
            output = self._static[path].share("", torch.empty_like(found, device=self._device))
            graph = self._recorder.record(lambda: output.copy_(forward()))
            graphs[num_rows] = _Captured(num_rows, graph, inputs, output)

    def _make_static(self, path: str) -> StaticInputs:
        def prepare(kwargs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
            replayed = self._model.prepare_encoder_cudagraph_replay_buffers(
                kwargs, self._max_items, self._max_items, path
            )
            values: dict[str, torch.Tensor | None] = replayed.values
            return values

        return StaticInputs(prepare, self._config.padding_logics)

    def _choose(self, needs: Sequence[Need]) -> dict[str, _Captured] | None:
        """The smallest graph of each path that the items go, if each has one."""
        chosen = {}
        for path in self._config.paths:
            num_rows = sum(need.rows[path] for need in needs)
            graphs = self._captured.get((path, needs[0].axis_keys), {})
            budget = smallest_fit(sorted(graphs), num_rows)
            if num_rows and budget is None:
                return None
            if num_rows and budget is not None:
                chosen[path] = graphs[budget]
        return chosen


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What the collector would free may not be freed in a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
