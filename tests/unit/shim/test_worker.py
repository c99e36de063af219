"""The workers' copies: equal to what lies in the region, and independent of it."""

import os
from collections.abc import Iterator

import pytest
import torch

from consumer_shim.scheduler import Load
from consumer_shim.worker import WorkerSide
from producer.memory.region import SharedRegion
from producer.wire.block import EmbeddingShape


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with SharedRegion.create("test", 1 << 16) as region:
        yield region


@pytest.fixture
def worker() -> Iterator[WorkerSide]:
    worker = WorkerSide(torch.device("cpu"))
    yield worker
    worker.close()


def put(region: SharedRegion, load_id: int, offset: int, tensor: torch.Tensor) -> Load:
    """Lays `tensor` into the region."""
    data = tensor.view(torch.uint8).numpy().tobytes()
    region.view[offset : offset + len(data)] = data
    shape = EmbeddingShape(
        num_rows=tensor.shape[0], width=tensor.shape[1], dtype=str(tensor.dtype).removeprefix("torch.")
    )
    return Load(load_id, f"image {load_id}", offset, shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_tensor_is_what_lies_in_the_region(
    region: SharedRegion, worker: WorkerSide, dtype: torch.dtype, num_rows: int
) -> None:
    expected = torch.randn(num_rows, 64).to(dtype)
    cache: dict[str, torch.Tensor] = {}
    worker.load(cache, [put(region, 1, 4096 + 128, expected)], os.getpid(), region.fd)
    assert cache["image 1"].dtype is dtype
    assert torch.equal(cache["image 1"], expected)


def test_it_owns_its_memory(region: SharedRegion, worker: WorkerSide) -> None:
    expected = torch.randn(4, 64)
    cache: dict[str, torch.Tensor] = {}
    worker.load(cache, [put(region, 1, 128, expected)], os.getpid(), region.fd)
    region.view[:] = bytes(region.num_bytes)
    assert torch.equal(cache["image 1"], expected)
    assert cache["image 1"].is_contiguous()
    assert cache["image 1"].untyped_storage().nbytes() == 4 * 64 * 4


def test_several_loads_beside_what_is_there(region: SharedRegion, worker: WorkerSide) -> None:
    tensors = [torch.randn(2, 8), torch.randn(3, 8)]
    loads = [put(region, number, 4096 * number, tensor) for number, tensor in enumerate(tensors, 1)]
    cache = {"other": torch.ones(1)}
    worker.load(cache, loads, os.getpid(), region.fd)
    assert list(cache) == ["other", "image 1", "image 2"]
    assert torch.equal(cache["image 1"], tensors[0])
    assert torch.equal(cache["image 2"], tensors[1])


def test_what_was_loaded_is_told_once(region: SharedRegion, worker: WorkerSide) -> None:
    loads = [put(region, number, 4096, torch.randn(1, 8)) for number in (3, 4)]
    assert worker.take_loaded() == []
    worker.load({}, loads, os.getpid(), region.fd)
    assert worker.take_loaded() == [3, 4]
    assert worker.take_loaded() == []


def test_the_region_is_mapped_once(region: SharedRegion, worker: WorkerSide) -> None:
    for number in (1, 2):
        worker.load({}, [put(region, number, 0, torch.randn(1, 8))], os.getpid(), region.fd)
        descriptors = len(os.listdir("/proc/self/fd"))
    for number in (3, 4):
        worker.load({}, [put(region, number, 0, torch.randn(1, 8))], os.getpid(), region.fd)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_without_loads_nothing_is_mapped(worker: WorkerSide) -> None:
    worker.load({}, [], 0, -1)
    assert worker.take_loaded() == []


def test_a_region_that_has_gone(worker: WorkerSide) -> None:
    load = Load(1, "image 1", 0, EmbeddingShape(num_rows=1, width=8, dtype="float32"))
    with pytest.raises(OSError, match="No such file"):
        worker.load({}, [load], 0, 0)
    assert worker.take_loaded() == []
