"""What makes a graph of a function: CUDA's capture, behind the little of it that `graphs` needs."""

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """What was recorded of a function: `replay` does it again, with what its tensors hold then."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """What makes graphs of functions."""

    def rehearse(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Runs `function` where `record` would record it: libraries load kernels and take workspaces meanwhile."""
        ...

    def record(self, function: Callable[[], torch.Tensor]) -> Graph: ...

    def clear(self) -> None:
        """Gives back what recording took, once no graph is left."""
        ...


class CudaRecorder:
    """Records into one pool of device memory, on a stream of its own."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def rehearse(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            found = function()
        self._stream.synchronize()
        return found

    def record(self, function: Callable[[], torch.Tensor]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):  # not `torch.cuda.graph`: it gives back all free memory each time, slowly
            graph.capture_begin(self._pool)
            try:
                function()
            finally:
                graph.capture_end()
        recorded: Graph = graph
        return recorded

    def clear(self) -> None:
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream, kept as long as the process lives
        self._pool = torch.cuda.graph_pool_handle()  # one that was emptied cannot be recorded into again
