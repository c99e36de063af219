"""Towers on the host whose operators are recorded, layout by layout, and run again without Python.

A small step is as much Python as mathematics. And Python is for one thread at a time: at each operator the step waits
for the event loop, or has it wait. What was recorded runs as one call. It is to the host what a graph is to a GPU, but
that memory is still allocated as it runs.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

logger = logging.getLogger(__name__)

_OFTEN = 8
"""Times that a layout comes before it is recorded, which takes as long as about 30 small steps."""
_LONGEST_S = 0.1
"""A step that takes longer loses little to Python, and would show no progress for long."""
_MAX_LAYOUTS = 64
"""Of which something is known; each recording takes about 2 MB."""


@dataclass(slots=True)
class _Layout:
    """How often it came, and what runs in place of the tower's own code once it has come often."""

    num_times: int = 0
    play: Callable[[torch.Tensor], torch.Tensor] | None = None


class RecordedTower:
    """The forward of a tower of Qwen-VL's kind. For one thread."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        """`forward` is the tower's own: what it does depends on nothing but shapes, types and grids."""
        self._forward = forward
        self._layouts: OrderedDict[Any, _Layout] = OrderedDict()
        self.is_recordable = True
        """False once it was seen that PyTorch cannot record it: oneDNN's products in vLLM, on CPUs without AMX."""

    def __call__(
        self,
        x: torch.Tensor,
        grid_thw: torch.Tensor | Sequence[Sequence[int]] | None,
        *,
        encoder_metadata: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As the tower's own, bit for bit.

        Args:
            x: pixels [num_patches, values of a patch].
            grid_thw: patches of each item in time, height and width.
            encoder_metadata: made of the grids, in their place; steps that bring it are not recorded.
        """
        if grid_thw is None or encoder_metadata is not None:
            return self._forward(x, grid_thw, encoder_metadata=encoder_metadata)
        layout = self._layout(x, grid_thw)
        if layout.play is not None:
            return layout.play(x)
        began_s = perf_counter()
        output = self._forward(x, grid_thw)
        layout.num_times += 1
        if layout.num_times == _OFTEN and self.is_recordable and perf_counter() - began_s < _LONGEST_S:
            layout.play = self._recorded(x, grid_thw, output)
        return output

    def _layout(self, x: torch.Tensor, grid_thw: torch.Tensor | Sequence[Sequence[int]]) -> _Layout:
        grids = grid_thw.tolist() if isinstance(grid_thw, torch.Tensor) else grid_thw
        key = x.dtype, x.shape, tuple(map(tuple, grids))
        found = self._layouts.setdefault(key, _Layout())
        self._layouts.move_to_end(key)
        if len(self._layouts) > _MAX_LAYOUTS:
            self._layouts.popitem(last=False)
        return found

    def _recorded(self, x: torch.Tensor, grid_thw: Any, expected: torch.Tensor) -> Callable[..., torch.Tensor] | None:
        """What does the same to pixels of this layout; None where it cannot be had."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of values that are the same in each step of a layout, and of age
                play: Callable[..., torch.Tensor] = torch.jit.trace(
                    lambda pixels: self._forward(pixels, grid_thw), (x,), check_trace=False
                )
            outputs = [play(x) for _ in range(2)]  # it is looked at in the first run, and made faster in the second
        except RuntimeError as error:
            logger.warning("steps cannot be recorded: %s", str(error).partition("\n")[0])
            self.is_recordable = False
            return None
        if not all(torch.equal(output, expected) for output in outputs):
            logger.warning("a step of %d patches was recorded, but gave something else: it is not used", len(x))
            return None
        return play
