"""The finite guard: nothing with NaN or infinity in it is ever published, and no padding makes any.

A graph computes rows of padding behind the real ones. Attention leaves its output there as it was, which may be NaN of
an earlier replay, and some of its kernels read the next layer's values there. So attention's output is cleared behind
the last sequence.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def are_finite(embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether all elements of each of `embeddings` are finite: [num_items] bool on their device, computed there."""
    if not embeddings[0].is_cuda:  # where the call below takes ten times as long
        if math.isfinite(_span(torch.cat(list(embeddings)))):
            return torch.ones(len(embeddings), dtype=torch.bool)
        return torch.tensor([math.isfinite(_span(embedding)) for embedding in embeddings])
    largest = torch._foreach_norm(list(embeddings), float("inf"))
    return torch.isfinite(torch.stack(largest))


def _span(values: torch.Tensor) -> float:
    """From the least to the largest; finite where all are."""
    least, largest = torch.aminmax(values)
    return float(largest) - float(least)


def clear_tails(model: torch.nn.Module) -> None:
    """Has every attention of the encoder clear what it returns for rows that belong to no sequence."""
    from vllm.model_executor.layers.attention import MMEncoderAttention

    for module in model.modules():
        if isinstance(module, MMEncoderAttention):
            module.register_forward_hook(_clear_tail, with_kwargs=True)


def _clear_tail(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: torch.Tensor
) -> torch.Tensor:
    """`output` [1, num_rows, ...] with zeros behind the rows of all sequences, in place."""
    lengths, ends = kwargs.get("sequence_lengths"), kwargs.get("cu_seqlens")
    if ends is None:
        return output  # items of one size, each a row of the batch: there is no tail
    num_rows = ends.max() if lengths is None else lengths.sum()  # FlashInfer's ends count elements, not rows
    is_tail = torch.arange(output.shape[1], device=output.device) >= num_rows
    return output.masked_fill_(is_tail.view(1, -1, *[1] * (output.ndim - 2)), 0)
