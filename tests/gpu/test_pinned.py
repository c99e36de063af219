"""The pool's region is pinned while the producer lives, so that embeddings are copied straight into it."""

import pytest
import torch

from producer.memory.region import SharedRegion
from producer.runner.pinned import pinned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_region_is_pinned_inside_the_block_only() -> None:
    region = SharedRegion.create("pinned-test", 1 << 20)
    tensor = torch.frombuffer(region.view, dtype=torch.uint8)
    with pinned(region.address, region.num_bytes, torch.device("cuda:0")):
        assert tensor.is_pinned()
        tensor.copy_(torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda:0"))
        assert (tensor == 7).all()
    assert not tensor.is_pinned()


def test_what_cannot_be_pinned_is_refused() -> None:
    with (
        pytest.raises(OSError, match="4096 bytes of host memory cannot be pinned"),
        pinned(0, 4096, torch.device("cuda:0")),
    ):
        pass
