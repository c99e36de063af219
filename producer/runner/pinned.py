"""Host memory that the device copies to and from without staging it, and can read in place."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch


@contextmanager
def pinned(address: int, num_bytes: int, device: torch.device) -> Iterator[None]:
    """Pins `num_bytes` at `address` for `device` while the body runs; nothing to do where the device is the host.

    All of its pages are taken from the host at once.

    Raises:
        OSError: CUDA refuses; the message says why.
    """
    if device.type != "cuda":
        yield
        return
    cudart = torch.cuda.cudart()
    try:
        torch.cuda.check_error(cudart.cudaHostRegister(address, num_bytes, 0))
    except RuntimeError as error:
        raise OSError(f"{num_bytes} bytes of host memory cannot be pinned: {error}") from None
    try:
        yield
    finally:
        torch.cuda.check_error(cudart.cudaHostUnregister(address))


def device_view(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`host` [n] uint8, which is pinned, as a tensor of `device`: the same memory, so what is written shows at once.

    The view does not keep the memory alive.
    """
    if device.type != "cuda":
        return host
    array = {"shape": tuple(host.shape), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=device)
