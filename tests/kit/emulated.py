"""What a device does that captured graphs are for, on the host, so that all but the capture itself is tested there.

Not reproduced: capture and its errors, streams, memory pools, kernels that are chosen by size, and attention that reads
behind the last sequence.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True, slots=True)
class _Again:
    """A graph: it does again, on the same tensors, what was recorded."""

    replay: Callable[[], torch.Tensor]


class Recorder:
    """In the place of `CudaRecorder`."""

    def rehearse(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        return function()

    def record(self, function: Callable[[], torch.Tensor]) -> Any:
        return _Again(function)

    def clear(self) -> None:
        return


@contextmanager
def attention_that_leaves_tails() -> Iterator[None]:
    """Attention over sequences takes rows behind the last, and leaves NaN there, as a device's may."""
    from vllm.model_executor.layers.attention import MMEncoderAttention

    whole = MMEncoderAttention._forward_sdpa

    def forward(self: Any, query: Any, key: Any, value: Any, cu_seqlens: Any = None) -> Any:
        num_rows = query.shape[1] if cu_seqlens is None else int(cu_seqlens.max())
        found = whole(self, *(one[:, :num_rows] for one in (query, key, value)), cu_seqlens)
        output = torch.full((found.shape[0], query.shape[1], *found.shape[2:]), float("nan"), dtype=found.dtype)
        output[:, :num_rows] = found
        return output

    with mock.patch.object(MMEncoderAttention, "_forward_sdpa", forward):
        yield
