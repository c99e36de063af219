"""Encoder steps: items → embeddings on the device, by graph replay where one fits and eagerly where none does."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

import torch
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.utils.jsontree import json_map_leaves

from producer.core import PreparedItem
from producer.errors import InternalError, ServiceError
from producer.metrics import Metrics
from producer.runner.budgets import pack
from producer.runner.graphs import EncoderGraphs, Need
from producer.runner.guard import are_finite
from producer.runner.inputs import StepInputs, can_join, on_host
from producer.runner.slot_ring import Slot, SlotRing
from producer.wire.contract import Reason

logger = logging.getLogger(__name__)

Outcome: TypeAlias = "torch.Tensor | ServiceError"
Way: TypeAlias = dict[str, str]
"""How an item was encoded, as attributes of its span: `path` is "graph" or "eager"."""

_MAX_LAYOUTS = 4096
"""Layouts of which it is remembered whether a replay equals eager execution."""
_FEW = 64


@dataclass(frozen=True, slots=True)
class _Item:
    """One item of a step: its inputs, and what it takes of a graph or why it can have none."""

    modality: str
    inputs: MultiModalKwargsItem
    need: Need | None
    miss_reason: str = ""


class StepUnderWay:
    """A step that was put on the device's queue, with the copy of its embeddings to the host behind it."""

    def __init__(
        self,
        embeddings: Sequence[torch.Tensor],
        retry: Callable[[int], torch.Tensor | None],
        metrics: Metrics,
        ways: Sequence[Way] = (),
    ) -> None:
        """`embeddings` of all items, on the device; `retry` computes one item's in another way, if there is one; `ways`
        say how each came about, for its span.
        """
        self._retry = retry
        self._metrics = metrics
        self.ways = ways
        self._is_finite = are_finite(embeddings).to("cpu", non_blocking=True)
        self._embeddings = list(_to_host(embeddings))
        self._done = torch.cuda.Event(blocking=True) if embeddings[0].is_cuda else None
        if self._done is not None:
            self._done.record()

    def finish(self) -> list[Outcome]:
        """Waits for the device; the items' embeddings [num_rows, width] on the host, or what they are refused with."""
        if self._done is not None:
            self._done.synchronize()
        return [
            embedding if is_finite else self._again(index)
            for index, (embedding, is_finite) in enumerate(zip(self._embeddings, self._is_finite.tolist(), strict=True))
        ]

    def _again(self, index: int) -> Outcome:
        embedding = self._retry(index)
        if embedding is not None and are_finite([embedding]).item():
            logger.error("a replayed graph gave NaN or infinity where encoding eagerly did not")
            return embedding.cpu()
        self._metrics.non_finite_outputs.inc()
        return InternalError(Reason.NON_FINITE_OUTPUT, "the embedding holds NaN or infinity")


class StepRunner:
    """Runs steps, one at a time, on the thread that drives the device. Owns the slot ring; uses the graphs."""

    def __init__(
        self,
        *,
        decode: Callable[[Any], MultiModalKwargsItem],
        embed: Callable[[Mapping[str, Any]], Sequence[torch.Tensor]],
        ring: SlotRing,
        graphs: EncoderGraphs | None,
        why_no_graphs: str,
        exact: bool,
        takes_compact: bool = False,
        metrics: Metrics,
    ) -> None:
        """
        Args:
            decode: a prepared item's `inputs` → what vLLM's processor made.
            embed: the model's eager encoding of one batch.
            ring: where inputs are put for the device.
            graphs: captured; None where there are none.
            why_no_graphs: the reason for that, a label of the misses.
            exact: each item is to have what `embed` gives for it alone, bit for bit.
            takes_compact: whether `embed` takes compact pixels (`producer.pixels`) as they are.
            metrics: where hits and misses are counted.
        """
        self._decode = decode
        self._embed = embed
        self._ring = ring
        self._graphs = graphs
        self._why_no_graphs = why_no_graphs
        self._exact = exact
        self._takes_compact = takes_compact
        self._metrics = metrics
        self._equals_eager: OrderedDict[Any, bool] = OrderedDict()  # by layout, for `exact`

    @torch.inference_mode()
    def launch(self, items: Sequence[PreparedItem]) -> StepUnderWay:
        """Puts a step on the device's queue."""
        prepared = [self._prepare(item) for item in items]
        embeddings: list[torch.Tensor] = []
        ways: list[Way] = []
        for run in pack(prepared, self._is_run):
            rows, way = self._encode(run)
            embeddings += rows
            ways += [way] * len(run)

        @torch.inference_mode()
        def retry(index: int) -> torch.Tensor | None:
            if ways[index]["path"] != "graph":
                return None
            (embedding,), _ = self._encode_eagerly([prepared[index]], "not_finite")
            return embedding

        return StepUnderWay(embeddings, retry, self._metrics, ways)

    def _prepare(self, item: PreparedItem) -> _Item:
        inputs = self._decode(item.inputs)
        if self._graphs is None:
            return _Item(item.modality, inputs, None, self._why_no_graphs)
        if item.modality not in self._graphs.modalities:
            return _Item(item.modality, inputs, None, "unsupported_modality")
        need = self._graphs.need(on_host(inputs), item.modality)
        if why := self._graphs.why_not(need):
            return _Item(item.modality, inputs, None, why)
        return _Item(item.modality, inputs, need)

    def _is_run(self, run: Sequence[_Item]) -> bool:
        """Whether these items, of which all but the last are known to be a run, can be encoded together."""
        *_, last, new = run
        if self._exact or last.modality != new.modality or not can_join(last.inputs, new.inputs):
            return False
        needs = [item.need for item in run if item.need is not None]
        return not needs or (len(needs) == len(run) and self._graphs is not None and self._graphs.fits(needs))

    def _encode(self, run: Sequence[_Item]) -> tuple[list[torch.Tensor], Way]:
        """The run's embeddings, and how they came about."""
        if run[0].need is None:
            return self._encode_eagerly(run, run[0].miss_reason)
        if not self._exact:
            return self._replay(run)
        layout = _layout(run[0])
        equals_eager = self._equals_eager.get(layout)
        if equals_eager:
            return self._replay(run)
        if equals_eager is False:
            return self._encode_eagerly(run, "not_exact")
        embeddings, way = self._encode_eagerly(run, "not_compared_yet")
        replayed, _ = self._replay(run, is_trial=True)
        self._equals_eager[layout] = torch.equal(embeddings[0], replayed[0])
        if len(self._equals_eager) > _MAX_LAYOUTS:
            self._equals_eager.popitem(last=False)
        return embeddings, way

    def _replay(self, run: Sequence[_Item], *, is_trial: bool = False) -> tuple[list[torch.Tensor], Way]:
        """As `_encode`; what is on trial is not counted."""
        graphs, needs = self._graphs, [item.need for item in run if item.need is not None]
        assert graphs is not None
        inputs = StepInputs([item.inputs for item in run])
        with self._slot(inputs.num_bytes) as slot:
            loaded = graphs.load(inputs.write(slot), needs)
        if loaded is None:
            return self._encode_eagerly(run, "too_many_sequences")
        if not is_trial:
            self._metrics.count_replay(num_items=len(run), graphs=loaded.graphs)
        way = {"path": "graph", "budget": "+".join(str(budget) for budget, _ in loaded.graphs)}
        return graphs.replay(loaded), way

    def _encode_eagerly(self, run: Sequence[_Item], why: str) -> tuple[list[torch.Tensor], Way]:
        self._metrics.graph_misses.labels(why).inc(len(run))
        inputs = StepInputs([item.inputs for item in run])
        with self._slot(inputs.num_bytes) as slot:
            kwargs = json_map_leaves(_off_slot, inputs.write(slot, takes_compact=self._takes_compact))
        embeddings = list(self._embed(kwargs))
        assert len(embeddings) == len(run), (len(embeddings), len(run))
        return embeddings, {"path": "eager", "budget": "none", "miss": why}

    @contextmanager
    def _slot(self, num_bytes: int) -> Iterator[Slot]:
        """As `SlotRing.acquire`; what it waits is observed."""
        since_s = perf_counter()
        with self._ring.acquire(num_bytes) as slot:
            self._metrics.slot_wait_seconds.observe(perf_counter() - since_s)
            yield slot


def _to_host(embeddings: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Copies that the device is yet to make: one for all that are neighbours in memory."""
    for run in pack(embeddings, lambda run: _follows(*run[-2:])):
        lengths = [len(one) for one in run]
        whole = run[0].as_strided((sum(lengths), *run[0].shape[1:]), run[0].stride())
        yield from whole.to("cpu", non_blocking=True).split(lengths)


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() + one.nbytes == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and (one.dtype, one.shape[1:], one.is_contiguous()) == (other.dtype, other.shape[1:], other.is_contiguous())
    )


def _off_slot(leaf: Any) -> Any:
    """A copy in device memory of what lies in a slot, so that the slot is free before the encoder runs."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_cuda else leaf


def _layout(item: _Item) -> str:
    """All of an item's inputs that may decide which kernels encode it: shapes, and values where there are few."""
    return repr((item.modality, json_map_leaves(_outline, on_host(item.inputs))))


def _outline(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return (tuple(leaf.shape), leaf.tolist() if leaf.numel() <= _FEW else None)
