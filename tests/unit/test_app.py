"""What a producer makes sure of before it says that it is ready; the stages are small functions here."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from producer.admission import Admission
from producer.app import _create_region, _warm_up
from producer.core import EmbeddingInfo, MediaItem, ModelInfo, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import InvalidItemError, UnsupportedModelError
from producer.memory.region import SharedRegion
from producer.metrics import Metrics
from producer.wire.block import EmbeddingShape
from producer.wire.contract import Reason

SHAPE = EmbeddingShape(num_rows=64, width=8, dtype="float32")
MODEL = ModelInfo(
    model="tiny",
    fingerprint="0" * 64,
    dtype="float32",
    input_width=8,
    modalities=("image",),
    versions={},
    attention_backend="TORCH_SDPA",
)


@pytest.fixture
def pool() -> Iterator[EmbeddingPool]:
    with SharedRegion.create("app", 1 << 20) as region:
        yield EmbeddingPool(region, epoch=1, lease_s=60, max_leases=10)


def admission(pool: EmbeddingPool, *, decodes: bool = True) -> Admission:
    async def prepare(key: str, item: MediaItem) -> PreparedItem:
        if not decodes:
            raise InvalidItemError(Reason.MEDIA_UNREADABLE, "no decoder")
        return PreparedItem(key=key, modality=item.modality, num_rows=64, metadata={}, inputs=None)

    def submit(item: PreparedItem) -> "Future[None]":
        pool.put(item.key, EmbeddingInfo(modality="image", shape=SHAPE, metadata={}), memoryview(bytes(64 * 8 * 4)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return Admission(
        pool,
        prepare,
        submit,
        fingerprint="0" * 64,
        modalities=("image",),
        max_queue_items=4,
        max_item_bytes=1 << 20,
        metrics=Metrics(),
    )


async def test_it_is_ready_once_an_image_was_encoded(pool: EmbeddingPool) -> None:
    assert await _warm_up(admission(pool), pool, MODEL) == 8
    assert pool.store.num_blocks == 1
    assert pool.num_leases == 0


async def test_a_model_that_cannot_encode_is_named(pool: EmbeddingPool) -> None:
    with pytest.raises(UnsupportedModelError, match="model tiny: a test image cannot be encoded: no decoder"):
        await _warm_up(admission(pool, decodes=False), pool, MODEL)


async def test_embeddings_wider_than_the_language_model_are_refused(pool: EmbeddingPool) -> None:
    """The shim would fail each of its requests; better nobody sends one."""
    narrow = dataclasses.replace(MODEL, input_width=4)
    with pytest.raises(UnsupportedModelError, match=r"model tiny: its embeddings have 8 elements a row, .* takes 4"):
        await _warm_up(admission(pool), pool, narrow)


def test_a_pool_larger_than_the_host_is_refused() -> None:
    with pytest.raises(OSError, match=r"pool_bytes is 70368744177664; this host has \d+ bytes of memory"):
        _create_region(1 << 46)
