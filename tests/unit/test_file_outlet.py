from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from producer.core import EmbeddingInfo
from producer.embedding_pool import EmbeddingPool
from producer.file_outlet import FileOutlet
from producer.memory.region import SharedRegion
from producer.wire.block import EmbeddingShape

SHAPE = EmbeddingShape(num_rows=4, width=8, dtype="bfloat16")
FILE_BYTES = 8 + 88 + SHAPE.payload_bytes


class Rig:
    """A pool, its files, and a clock that a test moves."""

    def __init__(self, pool: EmbeddingPool, folder: Path, max_files: int = 100) -> None:
        self.pool = pool
        self.folder = folder
        self.now_s = 1e9
        self.files = FileOutlet(
            folder, pool, max_bytes=max_files * FILE_BYTES, max_age_s=60.0, clock=lambda: self.now_s
        )

    async def publish(self, number: int, mm_hash: str = "") -> str:
        key = f"{number:064x}"
        info = EmbeddingInfo(modality="image", shape=SHAPE, content_part={}, mm_hash=mm_hash)
        self.pool.put(key, info, memoryview(embedding(number).view(torch.uint8).numpy()).cast("B"))
        lease = self.pool.grant(key)
        await self.files.ensure(lease)
        self.pool.release(lease.lease_id)
        return key

    def names(self) -> set[str]:
        return {path.parent.name for path in self.folder.glob("*/encoder_cache.safetensors")}


def embedding(number: int) -> torch.Tensor:
    return torch.full((4, 8), float(number), dtype=torch.bfloat16)


@pytest.fixture
def pool() -> Iterator[EmbeddingPool]:
    with SharedRegion.create("files", 1 << 20) as region:
        yield EmbeddingPool(region, epoch=1, lease_s=60, max_leases=100)


async def test_a_file_holds_the_embedding_under_both_names(pool: EmbeddingPool, tmp_path: Path) -> None:
    rig = Rig(pool, tmp_path / "new")
    key = await rig.publish(3, mm_hash="vllms-hash")
    assert rig.names() == {key, "vllms-hash"}
    for name in rig.names():
        tensors = load_file(rig.folder / name / "encoder_cache.safetensors")
        assert list(tensors) == ["ec_cache"]
        assert torch.equal(tensors["ec_cache"], embedding(3))
        assert [path.name for path in (rig.folder / name).iterdir()] == ["encoder_cache.safetensors"]


async def test_too_many_bytes_drop_what_was_used_longest_ago(pool: EmbeddingPool, tmp_path: Path) -> None:
    rig = Rig(pool, tmp_path, max_files=3)
    keys = [await rig.publish(number) for number in range(3)]
    await rig.publish(0)
    keys.append(await rig.publish(3))
    assert rig.names() == {keys[0], keys[2], keys[3]}
    assert not (tmp_path / keys[1]).exists()


async def test_what_nobody_asks_for_is_removed_in_time(pool: EmbeddingPool, tmp_path: Path) -> None:
    rig = Rig(pool, tmp_path)
    await rig.publish(1)
    rig.now_s += 40
    key = await rig.publish(2)
    rig.now_s += 40
    rig.files.expire()
    assert rig.names() == {key}


async def test_files_of_an_earlier_life_count(pool: EmbeddingPool, tmp_path: Path) -> None:
    old = await Rig(pool, tmp_path).publish(1)
    rig = Rig(pool, tmp_path, max_files=1)
    new = await rig.publish(2)
    assert rig.names() == {new} != {old}


async def test_a_file_that_somebody_removed_is_written_again(pool: EmbeddingPool, tmp_path: Path) -> None:
    rig = Rig(pool, tmp_path)
    key = await rig.publish(1)
    (tmp_path / key / "encoder_cache.safetensors").unlink()
    await rig.publish(1)
    assert rig.names() == {key}


def test_a_folder_that_cannot_be_made_is_an_error(pool: EmbeddingPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Rig(pool, tmp_path / "file" / "folder")
