"""Widths that matrix kernels like: an MLP of an odd width gets zeros up to the next multiple.

The zeros add nothing to any sum, so the mathematics are the same; on an H200 the kernels for a width that is not a
multiple of 8 take about twice as long.
"""

from typing import Any

import torch

MULTIPLE = 128


def pad_mlps(model: torch.nn.Module) -> int:
    """Pads every gated MLP of `model` (`gate_up_proj`, `down_proj`) in place; returns how many it padded."""
    padded = 0
    for module in model.modules():
        gate_up: Any = getattr(module, "gate_up_proj", None)
        down: Any = getattr(module, "down_proj", None)
        if not is_plain(gate_up) or not is_plain(down) or gate_up.weight.shape[0] != 2 * down.weight.shape[1]:
            continue
        lacking = -down.weight.shape[1] % MULTIPLE
        if lacking:
            gate_up.weight.data = _pad_halves(gate_up.weight.data, lacking)
            if gate_up.bias is not None:
                gate_up.bias.data = _pad_halves(gate_up.bias.data, lacking)
            down.weight.data = torch.nn.functional.pad(down.weight.data, (0, lacking))
            padded += 1
    return padded


def is_plain(linear: object) -> bool:
    """Whether a layer's weight is a matrix of numbers as they are, not quantized or packed."""
    weight = getattr(linear, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point() and weight.itemsize > 1


def _pad_halves(tensor: torch.Tensor, lacking: int) -> torch.Tensor:
    """Zeros behind each half of the rows."""
    halves = tensor.unflatten(0, (2, -1))
    pad = (0, 0) * (tensor.ndim - 1) + (0, lacking)
    return torch.nn.functional.pad(halves, pad).flatten(0, 1)
