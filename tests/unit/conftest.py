"""What the unit tests share."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from producer.core import EmbeddingInfo, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.memory.region import SharedRegion
from producer.metrics import Metrics
from producer.wire.block import EmbeddingShape
from tests.kit.samples import total

# How long an example takes is no property of the code: a busy machine must not fail a test.
settings.register_profile("ec-producer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ec-producer")

EPOCH = 0xE0
LEASE_S = 60.0
NUM_BLOCKS = 4
"""How many embeddings of `SHAPE` the pool holds: one a page."""
SHAPE = EmbeddingShape(num_rows=4, width=8, dtype="float32")
INFO = EmbeddingInfo(modality="image", shape=SHAPE, content_part={})


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def key_of(number: int) -> str:
    return f"{number:064x}"


def rows_of(number: int) -> memoryview:
    return memoryview(bytes([number % 256]) * SHAPE.payload_bytes)


def prepared(number: int = 0, *, num_rows: int = SHAPE.num_rows, modality: str = "image", inputs: Any = None) -> Any:
    return PreparedItem(key=key_of(number), modality=modality, num_rows=num_rows, content_part={}, inputs=inputs)


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels, 0 where it was never touched."""
    return total(metrics.registry, name, **labels)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with SharedRegion.create("ec-producer-test", NUM_BLOCKS * 4096) as region:
        yield region


@pytest.fixture
def pool(region: SharedRegion, clock: Clock) -> EmbeddingPool:
    """Room for `NUM_BLOCKS` embeddings of `SHAPE`, and for as many leases and two."""
    return EmbeddingPool(region, epoch=EPOCH, lease_s=LEASE_S, max_leases=NUM_BLOCKS + 2, clock=clock)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()
