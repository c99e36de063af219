"""The workers' side: region → the engine's encoder cache. Pulls nothing, waits for nothing."""

from collections.abc import Sequence

import torch

from consumer_shim.scheduler import Load
from producer.memory.region import SharedRegion


class WorkerSide:
    """Owns this worker's mapping of the landing region, made at the first load."""

    def __init__(self, device: torch.device) -> None:
        """Tensors are put on `device`."""
        self._device = device
        self._region: SharedRegion | None = None
        self._loaded: list[int] = []

    def load(self, encoder_cache: dict[str, torch.Tensor], loads: Sequence[Load], pid: int, fd: int) -> None:
        """Copies `loads` out of the region that process `pid` holds as `fd`, into `encoder_cache` by identifier.

        Each tensor is [num_rows, width], on the device, and owns its memory: the region is reused after this step.
        """
        if loads and self._region is None:
            self._region = SharedRegion.attach(pid, fd)
        for load in loads:
            assert self._region is not None
            encoder_cache[load.identifier] = self._tensor(self._region, load)
            self._loaded.append(load.load_id)

    def take_loaded(self) -> list[int]:
        """Loads done since the last call."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def close(self) -> None:
        if self._region is not None:
            self._region.close()

    def _tensor(self, region: SharedRegion, load: Load) -> torch.Tensor:
        shape = load.shape
        count = shape.num_rows * shape.width
        dtype = getattr(torch, shape.dtype)
        rows = torch.frombuffer(region.view, dtype=dtype, count=count, offset=load.offset)
        return rows.view(shape.num_rows, shape.width).to(self._device, copy=True)
