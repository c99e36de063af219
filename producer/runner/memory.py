"""The plan of device memory: measured at start, step by step, before anything is served.

Weights are there. An eager step of the largest size shows what activations take; a capture for trial, which is given
back, what the graphs will. Then the graphs are captured for good, and must take what was reserved for them.
"""

import dataclasses
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from producer.errors import MemoryPlanError
from producer.runner.graphs import EncoderGraphs

logger = logging.getLogger(__name__)

_TOLERANCE_BYTES = 8 << 20
_TOLERANCE = 0.02
_MIB = 1 << 20


class DeviceMemory(Protocol):
    """What is measured of a device's memory, in bytes."""

    @property
    def total_bytes(self) -> int: ...
    def used_bytes(self) -> int:
        """What all processes hold of it, once this one has given back what it only keeps for later."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """How much more this process holds during `run` than before."""
        ...


class CudaMemory:
    """The device's own figures, and PyTorch's for the peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def used_bytes(self) -> int:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        self.used_bytes()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device) - before)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of device memory by what takes them."""

    limit_bytes: int
    """What this process may take, with what others and the driver had taken before it measured."""
    used_bytes: int
    """What was taken then: by others, by the driver, and by the weights."""
    weights_bytes: int
    activation_bytes: int
    graph_bytes: int
    """Reserved for the graphs: what they took on trial."""
    kept_bytes: int = 0
    """What the trial did not give back."""
    captured_bytes: int = 0
    """What the graphs have taken."""

    @property
    def rest_bytes(self) -> int:
        """What is left for embeddings on their way, and for nothing."""
        return self.limit_bytes - self.used_bytes - self.activation_bytes - self.graph_bytes

    @property
    def difference_bytes(self) -> int:
        """What the graphs took more than was reserved."""
        return self.captured_bytes - self.graph_bytes

    @property
    def agrees(self) -> bool:
        """Whether the graphs took what was reserved for them, to 8 MiB or 2 %."""
        return abs(self.difference_bytes) <= max(_TOLERANCE_BYTES, _TOLERANCE * self.graph_bytes)

    @property
    def parts(self) -> dict[str, int]:
        """For the metrics."""
        return {
            "weights": self.weights_bytes,
            "activations": self.activation_bytes,
            "graphs_reserved": self.graph_bytes,
            "graphs": self.captured_bytes,
            "rest": self.rest_bytes,
        }

    def check(self) -> None:
        """
        Raises:
            MemoryPlanError: it does not fit; the message has the numbers.
        """
        if self.rest_bytes < 0:
            raise MemoryPlanError(
                f"the encoder does not fit into device memory: of {_mib(self.limit_bytes)} that it may use,"
                f" {_mib(self.used_bytes)} are taken ({_mib(self.weights_bytes)} of them by its weights), a step of the"
                f" largest size takes {_mib(self.activation_bytes)} and graphs take {_mib(self.graph_bytes)};"
                f" {_mib(-self.rest_bytes)} are lacking. Lower max_batch_rows, max_item_rows or graph_rows"
            )

    def __str__(self) -> str:
        return (
            f"weights {_mib(self.weights_bytes)}, activations {_mib(self.activation_bytes)}, graphs"
            f" {_mib(self.captured_bytes)} (reserved {_mib(self.graph_bytes)}), left {_mib(self.rest_bytes)}"
        )


class CaptureFailedError(Exception):
    """The graphs cannot be captured; nothing of them is left."""


def plan_memory(
    memory: DeviceMemory,
    graphs: EncoderGraphs | None,
    largest_step: Callable[[], None],
    *,
    weights_bytes: int,
    limit_bytes: int = 0,
) -> MemoryPlan:
    """Measures, plans, and captures `graphs`; what it returns is what is there then.

    Args:
        memory: of the device, which holds the weights already.
        graphs: not captured yet; None to do without.
        largest_step: runs a step of the largest size eagerly.
        weights_bytes: of the model.
        limit_bytes: what this process may take; 0 for all that others leave.

    Raises:
        MemoryPlanError: it does not fit.
        CaptureFailedError: the graphs cannot be captured; all that they took is given back.
    """
    activation_bytes = _measure_activations(memory, largest_step, weights_bytes)
    if graphs is not None:
        _capture(memory, graphs.rehearse)
    used_bytes = memory.used_bytes()
    others_bytes = used_bytes - weights_bytes
    limit_bytes = min(memory.total_bytes, others_bytes + limit_bytes) if limit_bytes else memory.total_bytes
    graph_bytes = kept_bytes = captured_bytes = 0
    if graphs is not None:
        _capture(memory, graphs.capture)
        graph_bytes = memory.used_bytes() - used_bytes
        graphs.clear()
        kept_bytes = memory.used_bytes() - used_bytes
    plan = MemoryPlan(
        limit_bytes=limit_bytes,
        used_bytes=used_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
        kept_bytes=kept_bytes,
    )
    plan.check()
    if graphs is not None:
        before_bytes = memory.used_bytes() - kept_bytes
        _capture(memory, graphs.capture)
        captured_bytes = memory.used_bytes() - before_bytes
    plan = dataclasses.replace(plan, captured_bytes=captured_bytes)
    log = logger.info if plan.agrees else logger.warning
    log("device memory: %s", plan)
    return plan


def _measure_activations(memory: DeviceMemory, largest_step: Callable[[], None], weights_bytes: int) -> int:
    try:
        largest_step()  # libraries take what they need once
        return memory.peak_bytes(largest_step)
    except torch.OutOfMemoryError as error:
        raise MemoryPlanError(
            f"the encoder does not fit into device memory: of {_mib(memory.total_bytes)},"
            f" {_mib(memory.used_bytes())} are taken ({_mib(weights_bytes)} of them by its weights), and a step of the"
            f" largest size finds no room: {' '.join(str(error).split())[:200]}. Lower max_batch_rows and max_item_rows"
        ) from None


def _capture(memory: DeviceMemory, capture: Callable[[], None]) -> None:
    try:
        capture()
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        return
    memory.used_bytes()  # gives back what is not used any more; the error, gone here, had kept it
    raise CaptureFailedError(said)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.0f} MiB"
