"""The publisher: what is not as promised never reaches the pool."""

import pytest
import torch

from producer.core import PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import InternalError, OverloadedError
from producer.publisher import Publisher
from producer.wire.block import BlockIdentity, EmbeddingShape, read_block
from producer.wire.contract import Reason
from tests.unit.conftest import EPOCH, INFO, NUM_BLOCKS, key_of, prepared, rows_of

PART = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 4, 4]}}


@pytest.fixture
def publisher(pool: EmbeddingPool) -> Publisher:
    return Publisher(pool)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_bytes_arrive(publisher: Publisher, pool: EmbeddingPool, dtype: str) -> None:
    embedding = torch.arange(32).reshape(4, 8).to(getattr(torch, dtype))
    item = PreparedItem(key=key_of(1), modality="image", num_rows=4, content_part=PART, inputs=None)
    publisher.publish(item, embedding)
    lease = pool.grant(key_of(1))
    shape = EmbeddingShape(num_rows=4, width=8, dtype=dtype)
    assert (lease.info.shape, lease.info.modality, lease.info.content_part) == (shape, "image", PART)
    identity = BlockIdentity(key=bytes.fromhex(key_of(1)), epoch=EPOCH, generation=lease.generation)
    with pool.open_block(lease.lease_id) as block:
        rows = bytearray(read_block(block, identity, shape))
    assert torch.equal(torch.frombuffer(rows, dtype=embedding.dtype).reshape(4, 8), embedding)


def test_a_view_is_laid_out_row_by_row(publisher: Publisher, pool: EmbeddingPool) -> None:
    embedding = torch.arange(32.0).reshape(8, 4).t()
    publisher.publish(prepared(1), embedding)
    publisher.publish(prepared(2), embedding.contiguous())
    first, second = (pool.grant(key_of(number)) for number in (1, 2))
    with pool.open_block(first.lease_id) as one, pool.open_block(second.lease_id) as other:
        assert one[128:-64] == other[128:-64]


@pytest.mark.parametrize("shape", [(3, 8), (5, 8), (4,), (1, 4, 8)], ids=str)
def test_another_shape_than_promised_is_refused(
    publisher: Publisher, pool: EmbeddingPool, shape: tuple[int, ...]
) -> None:
    with pytest.raises(InternalError, match=r"the encoder returned shape \(.*\) for 4 rows") as caught:
        publisher.publish(prepared(1), torch.zeros(shape))
    assert caught.value.reason is Reason.ENCODE_FAILED
    assert pool.store.num_blocks == 0


def test_a_full_pool_is_the_items_error(publisher: Publisher, pool: EmbeddingPool) -> None:
    for number in range(NUM_BLOCKS):
        pool.put(key_of(number), INFO, rows_of(number))
        pool.grant(key_of(number))
    with pytest.raises(OverloadedError):
        publisher.publish(prepared(50), torch.zeros(4, 8))
