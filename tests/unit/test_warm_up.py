"""What a producer makes sure of before it says that it is ready; the stages are small functions here."""

import asyncio
import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from producer.admission import Admission
from producer.core import EmbeddingInfo, MediaItem, ModelInfo, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import InvalidItemError, UnsupportedModelError
from producer.memory.region import SharedRegion
from producer.metrics import Metrics
from producer.warm_up import encode_samples
from producer.wire.block import EmbeddingShape
from producer.wire.contract import Reason
from tests.kit.steps import on_this_loop

WIDTHS = {"image": 24, "video": 24, "audio": 8}
"""As with DeepStack, of which sound has no part."""
MODEL = ModelInfo(
    model="tiny",
    fingerprint="0" * 64,
    dtype="float32",
    widths=WIDTHS,
    versions={},
    attention_backend="TORCH_SDPA",
)


class Stages:
    """What comes behind admission: it remembers what came, and gives each modality rows as wide as a test says."""

    def __init__(self, pool: EmbeddingPool) -> None:
        self._pool = pool
        self.items: list[MediaItem] = []
        self.widths = dict(WIDTHS)
        self.undecodable = ""
        self.stuck = ""

    def admission(self, *, max_item_bytes: int = 1 << 20) -> Admission:
        return Admission(
            self._pool,
            on_this_loop(self._prepare),
            self._submit,
            fingerprint="0" * 64,
            modalities=tuple(WIDTHS),
            max_queue_items=4,
            max_item_bytes=max_item_bytes,
            metrics=Metrics(),
        )

    async def _prepare(self, key: str, item: MediaItem) -> PreparedItem:
        self.items.append(item)
        if item.modality == self.undecodable:
            raise InvalidItemError(Reason.MEDIA_UNREADABLE, "no decoder")
        if item.modality == self.stuck:
            await asyncio.Event().wait()
        return PreparedItem(key=key, modality=item.modality, num_rows=64, content_part={}, inputs=None)

    def _submit(self, item: PreparedItem) -> "Future[None]":
        shape = EmbeddingShape(num_rows=item.num_rows, width=self.widths[item.modality], dtype="float32")
        info = EmbeddingInfo(modality=item.modality, shape=shape, content_part={})
        self._pool.put(item.key, info, memoryview(bytes(shape.payload_bytes)))
        done: Future[None] = Future()
        done.set_result(None)
        return done


@pytest.fixture
def pool() -> Iterator[EmbeddingPool]:
    with SharedRegion.create("app", 1 << 20) as region:
        yield EmbeddingPool(region, epoch=1, lease_s=60, max_leases=10)


@pytest.fixture
def stages(pool: EmbeddingPool) -> Stages:
    return Stages(pool)


async def test_it_is_ready_once_an_item_of_each_modality_was_encoded(stages: Stages, pool: EmbeddingPool) -> None:
    await encode_samples(stages.admission(), pool, MODEL)
    assert [item.modality for item in stages.items] == ["image", "video", "audio"]
    assert pool.store.num_blocks == 3
    assert (pool.num_leases, pool.store.num_pinned) == (0, 0)


async def test_only_what_is_served_is_tried(stages: Stages, pool: EmbeddingPool) -> None:
    await encode_samples(stages.admission(), pool, dataclasses.replace(MODEL, widths={"audio": 8}))
    assert [item.modality for item in stages.items] == ["audio"]


@pytest.mark.parametrize("modality", WIDTHS)
async def test_a_modality_that_cannot_be_encoded_is_named(stages: Stages, pool: EmbeddingPool, modality: str) -> None:
    stages.undecodable = modality
    with pytest.raises(UnsupportedModelError, match=f"model tiny: a test {modality} cannot be encoded: no decoder"):
        await encode_samples(stages.admission(), pool, MODEL)


async def test_an_encode_that_never_ends_is_named(
    stages: Stages, pool: EmbeddingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.warm_up._TIMEOUT_S", 0.01)
    stages.stuck = "video"
    only_video = dataclasses.replace(MODEL, widths={"video": 24})
    with pytest.raises(UnsupportedModelError, match="model tiny: a test video cannot be encoded"):
        await encode_samples(stages.admission(), pool, only_video)


@pytest.mark.parametrize(
    ("modality", "width"), [("image", 8), ("image", 32), ("video", 16), ("video", 25), ("audio", 24), ("audio", 4)]
)
async def test_embeddings_of_another_width_than_the_language_models_are_refused(
    stages: Stages, pool: EmbeddingPool, modality: str, width: int
) -> None:
    """The shim would fail each of its requests; better nobody sends one."""
    stages.widths[modality] = width
    takes = f"its language model takes {WIDTHS[modality]}"
    said = f"model tiny: its {modality} embeddings have {width} elements a row, {takes}"
    with pytest.raises(UnsupportedModelError, match=said):
        await encode_samples(stages.admission(), pool, MODEL)


async def test_a_small_limit_for_files_does_not_stop_it(stages: Stages, pool: EmbeddingPool) -> None:
    await encode_samples(stages.admission(max_item_bytes=100 << 10), pool, MODEL)
