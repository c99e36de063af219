"""The engine: the encoder, its graphs and the slot ring put together, within a plan of the device's memory."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from producer.core import PreparedItem
from producer.errors import UnsupportedModelError
from producer.metrics import Metrics
from producer.runner.encoder import VllmEncoder
from producer.runner.graphs import EncoderGraphs
from producer.runner.memory import CaptureFailedError, CudaMemory, MemoryPlan, plan_memory
from producer.runner.recorder import CudaRecorder
from producer.runner.slot_ring import SlotRing
from producer.runner.steps import StepRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What of `ServeConfig` the engine is made by; the fields are the settings of those names."""

    eager: bool
    require_graphs: bool
    graph_rows: int
    graph_items: int
    num_slots: int
    slot_bytes: int
    max_batch_rows: int
    max_item_rows: int
    device_memory_bytes: int


def start_engine(
    encoder: VllmEncoder, samples: Sequence[PreparedItem], settings: EngineSettings, metrics: Metrics
) -> StepRunner:
    """Plans memory and captures graphs, where `encoder`, which is loaded, is on a device that has them.

    Args:
        encoder: loaded.
        samples: an item of each modality that is served.
        settings: of the engine.
        metrics: of the service.

    Raises:
        UnsupportedModelError: it does not fit into the device's memory, or graphs are required and cannot be captured.
    """
    graphs, why_none = _graphs(encoder, settings)
    if encoder.device.type == "cuda":
        graphs, why_none = _plan(encoder, graphs, why_none, samples, settings, metrics)
    if graphs is None and settings.require_graphs:
        raise UnsupportedModelError(f"graphs are required, and there are none: {why_none}")
    logger.info("graphs: %s", why_none if graphs is None else f"{graphs.num_graphs} of {graphs.captured_rows} rows")
    ring = SlotRing.allocate(settings.num_slots, settings.slot_bytes, encoder.device)
    return _runner(encoder, ring, graphs, why_none, metrics, exact=encoder.is_exact)


def _graphs(encoder: VllmEncoder, settings: EngineSettings) -> tuple[EncoderGraphs | None, str]:
    """Graphs to capture, or why there are none: a reason of `graph_misses`."""
    if settings.eager:
        return None, "eager"
    if encoder.device.type != "cuda":
        return None, "no_device"
    try:
        graphs = encoder.graphs(settings.graph_rows, settings.graph_items, CudaRecorder())
    except Exception as error:  # the model's own code, which may not be as complete as its class says
        logger.error("NO GRAPHS: the model's support for them fails with %s: %s", type(error).__name__, error)
        return None, "unsupported_model"
    if graphs is None:
        return None, "unsupported_model"
    return (graphs, "") if graphs.budgets else (None, "too_large")


def _plan(
    encoder: VllmEncoder,
    graphs: EncoderGraphs | None,
    why_none: str,
    samples: Sequence[PreparedItem],
    settings: EngineSettings,
    metrics: Metrics,
) -> tuple[EncoderGraphs | None, str]:
    """`graphs` captured and paid for, or none and why."""
    memory, limit_bytes = CudaMemory(encoder.device), settings.device_memory_bytes
    ring = SlotRing.allocate(2, settings.slot_bytes, encoder.device)
    trial = _runner(encoder, ring, None, "", Metrics(), exact=False)

    most_rows = max(settings.max_batch_rows, settings.max_item_rows)

    def largest_step() -> None:  # many small items take what a large one does
        for sample in samples:
            trial.launch([sample] * max(1, most_rows // max(1, sample.num_rows))).finish()

    def plan(graphs: EncoderGraphs | None) -> MemoryPlan:
        return plan_memory(memory, graphs, largest_step, weights_bytes=encoder.weights_bytes, limit_bytes=limit_bytes)

    try:
        made = plan(graphs)
    except CaptureFailedError as error:
        logger.error("NO GRAPHS: their capture failed, so every step runs eagerly: %s", str(error))
        graphs, why_none = None, "capture_failed"
        made = plan(None)
    for part, num_bytes in made.parts.items():
        metrics.device_bytes.labels(part).set(num_bytes)
    metrics.device_bytes.labels("held").set_function(lambda: torch.cuda.memory_reserved(encoder.device))
    if limit_bytes:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / memory.total_bytes, encoder.device)
    return graphs, why_none


def _runner(
    encoder: VllmEncoder, ring: SlotRing, graphs: EncoderGraphs | None, why_none: str, metrics: Metrics, *, exact: bool
) -> StepRunner:
    return StepRunner(
        decode=encoder.decode,
        embed=encoder.embed,
        ring=ring,
        graphs=graphs,
        why_no_graphs=why_none,
        exact=exact,
        takes_compact=encoder.takes_compact,
        metrics=metrics,
    )
