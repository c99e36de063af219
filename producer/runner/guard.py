"""The finite guard: nothing with NaN or infinity in it is ever published."""

import torch


def is_finite(embedding: torch.Tensor) -> bool:
    """Whether every element of `embedding` [num_rows, width] is finite; computed on its device, one flag read back."""
    return bool(torch.isfinite(embedding).all())
