"""`ec-producer` with an encoder that fails on command: a device that is stuck, slow or lost cannot be had on demand.

    python -m tests.kit.faulty_serve FOLDER serve MODEL …

The fault is the name of a file in FOLDER: `stuck` (a step does not end while the file is there), `slow` (the same, but
each second a block is done), `lost` (the device fails as after an illegal access). All else is the real service. It
does not reproduce what a real fault does to a device's memory.
"""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from producer.cli import main


def add_faults(folder: Path) -> None:
    from producer.runner.encoder import VllmEncoder

    embed, on_progress = VllmEncoder.embed, VllmEncoder.on_progress
    ticks: list[Callable[[], None]] = []

    def remember(self: Any, tick: Callable[[], None]) -> None:
        ticks.append(tick)
        on_progress(self, tick)

    def faulty(self: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        while (folder / "stuck").exists():
            time.sleep(0.05)
        while (folder / "slow").exists():
            time.sleep(1.0)
            ticks[-1]()
        if (folder / "lost").exists():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return embed(self, kwargs)

    VllmEncoder.on_progress, VllmEncoder.embed = remember, faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    add_faults(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
