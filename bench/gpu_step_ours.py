"""Our encoder steps, as the service runs them, and what float32 makes of the same pictures."""

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu_timing import (
    REPEATS,
    Reference,
    are_all_finite,
    device_ms,
    jpegs,
    relative_error,
    times_for,
    wall_ms,
)
from tests.kit.engines import prepared_item

GRAPH_ROWS, MOST_ITEMS = 8192, 32


class Ours:
    """The service's own engine: fused, graphs on its own ladder, its slot ring."""

    def __init__(self, model: str) -> None:
        from producer import preprocess_worker
        from producer.decode import MODALITIES
        from producer.media_limits import MediaLimits
        from producer.runner.encoder import VllmEncoder

        self._encoder: Any = VllmEncoder(
            model=model,
            dtype="auto",
            mm_encoder_attn_backend="FLASH_ATTN",
            revision="",
            trust_remote_code=False,
            mm_processor_kwargs={},
            media_io_kwargs={},
            modalities=MODALITIES[:1],
            fidelity="fast",
        )
        self._info = self._encoder.load()
        self._work = preprocess_worker.make(self._encoder.model_config, self._encoder.forms, MediaLimits())

    def capture(self) -> dict[str, object]:
        """Makes the engine as the service does; what it is."""
        from bench.alone import engine_settings
        from producer.config import ServeConfig
        from producer.metrics import Metrics
        from producer.runner.engine import start_engine

        since_s, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        config = ServeConfig(model="model", graph_rows=GRAPH_ROWS, graph_items=MOST_ITEMS, require_graphs=True)
        (sample,) = self.items(jpegs(448, 1))
        self._metrics = Metrics()
        self.runner: Any = start_engine(self._encoder, [sample], engine_settings(config), self._metrics)
        torch.cuda.synchronize()
        return {
            "attention": self._info.attention_backend,
            "budgets": budgets_of(self.runner),
            "capture_s": time.perf_counter() - since_s,
            "capture_mib": (free - torch.cuda.mem_get_info()[0]) / 2**20,
        }

    def items(self, images: Sequence[bytes]) -> list[Any]:
        """Pictures made ready by what runs in the service's preprocessing processes."""
        from producer.core import MediaItem

        return [prepared_item(self._work, MediaItem(modality="image", data=image)) for image in images]

    def measure(self, side: int, number: int, reference: Reference) -> dict[str, object]:
        found = step_figures(self.runner, self.items(jpegs(side, number)), side, reference)
        misses = self._metrics.registry.get_sample_value("ec_producer_graph_misses_total", {"reason": "too_large"})
        return found | {"too_large_for_graphs": int(misses or 0)}

    def close(self) -> None:
        self._encoder.close()


def budgets_of(runner: Any) -> list[int]:
    """Rows of its graphs."""
    return list(runner._graphs.captured_rows)


def step_figures(runner: Any, items: Sequence[Any], side: int, reference: Reference) -> dict[str, object]:
    """Of one step of `items`, which one replay can do.

    `replay_ms` is the device's time for the graph; `period_ms` that of a step, from one to the next, while the next is
    launched before the last is waited for; `overhead_ms` the difference; `launch_ms` the host's part with a device that
    waits.
    """
    embeddings = finished(runner.launch(items))
    loaded = _loaded(runner, items)
    replayed = [one.graph for one in loaded.captured.values()]
    with torch.inference_mode():
        replay_ms = device_ms(lambda: [graph.replay() for graph in replayed])
    number = times_for(replay_ms)
    period_ms = statistics.median(_period_ms(runner, items, number) for _ in range(REPEATS))
    again = finished(runner.launch(items))
    return {
        "rows": sum(item.num_rows for item in items),
        "budget": sum(budget for budget, _ in loaded.graphs),
        "replay_ms": replay_ms,
        "period_ms": period_ms,
        "overhead_ms": period_ms - replay_ms,
        "launch_ms": statistics.median(_launch_ms(runner, items) for _ in range(number)),
        "step_ms": wall_ms(lambda: runner.launch(items).finish()),
        "error": relative_error(embeddings, side, reference),
        "is_finite": are_all_finite(embeddings),
        "is_same_again": all(torch.equal(one, other) for one, other in zip(embeddings, again, strict=True)),
    }


def finished(step: Any) -> list[torch.Tensor]:
    """Embeddings of a step, which must have some of every item."""
    outcomes = step.finish()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome.clone() for outcome in outcomes]


def _loaded(runner: Any, items: Sequence[Any]) -> Any:
    """The step's graphs, with its inputs in them."""
    from producer.runner.inputs import StepInputs

    prepared = [runner._prepare(item) for item in items]
    if any(one.need is None for one in prepared):
        raise RuntimeError(f"no graph takes them: {[one.miss_reason for one in prepared]}")
    inputs = StepInputs([one.inputs for one in prepared])
    with torch.inference_mode(), runner._ring.acquire(inputs.num_bytes) as slot:
        return runner._graphs.load(inputs.write(slot), [one.need for one in prepared])


def _period_ms(runner: Any, items: Sequence[Any], number: int) -> float:
    """From the end of the first step to that of the last one, for each."""
    last = runner.launch(items)
    step = runner.launch(items)
    last.finish()
    since_s = time.perf_counter()
    for _ in range(number):
        last, step = step, runner.launch(items)
        last.finish()
    took_s = time.perf_counter() - since_s
    step.finish()
    return took_s / number * 1000


def _launch_ms(runner: Any, items: Sequence[Any]) -> float:
    since_s = time.perf_counter()
    step = runner.launch(items)
    took_ms = (time.perf_counter() - since_s) * 1000
    step.finish()
    return took_ms


class Float32:
    """The model's own eager code in float32, which is what all others are to be near to."""

    def __init__(self, model: str) -> None:
        from producer import preprocess_worker
        from producer.decode import MODALITIES
        from producer.media_limits import MediaLimits
        from producer.runner.encoder import VllmEncoder

        self._encoder = VllmEncoder(
            model=model,
            dtype="float32",
            mm_encoder_attn_backend="TORCH_SDPA",
            revision="",
            trust_remote_code=False,
            mm_processor_kwargs={},
            media_io_kwargs={},
            modalities=MODALITIES[:1],
            fidelity="exact",
        )
        self._encoder.load()
        self._work = preprocess_worker.make(self._encoder.model_config, self._encoder.forms, MediaLimits())

    def write(self, path: Path, numbers: Mapping[int, int]) -> None:
        """Embeddings of so many pictures of each side, whole or not at all."""
        found = {
            (side, index): self._embedding(image)
            for side, number in numbers.items()
            for index, image in enumerate(jpegs(side, number))
        }
        draft = path.with_suffix(".tmp")
        torch.save(found, draft)
        os.replace(draft, path)

    def _embedding(self, image: bytes) -> torch.Tensor:
        from producer.core import MediaItem
        from producer.metrics import Metrics
        from producer.runner.slot_ring import SlotRing
        from producer.runner.steps import StepRunner

        item = prepared_item(self._work, MediaItem(modality="image", data=image))
        ring = SlotRing.allocate(2, 64 << 20, self._encoder.device)
        runner = StepRunner(
            decode=self._encoder.decode,
            embed=self._encoder.embed,
            ring=ring,
            graphs=None,
            why_no_graphs="eager",
            exact=True,
            metrics=Metrics(),
        )
        (embedding,) = finished(runner.launch([item]))
        return embedding.cpu()

    def close(self) -> None:
        self._encoder.close()
