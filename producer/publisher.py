"""Step output → embedding pool: copied out, made visible. Runs on the step loop's thread."""

import ctypes

import torch

from producer.core import EmbeddingInfo, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import InternalError
from producer.wire.block import EmbeddingShape
from producer.wire.contract import Reason

_SMALL_BYTES = 1 << 20
"""Copied in less time than another thread takes until it lets this one go on: PyTorch lets others run at each call."""


class Publisher:
    """Puts embeddings into `pool`; an embedding that is not as promised is refused, not published."""

    def __init__(self, pool: EmbeddingPool) -> None:
        self._pool = pool

    def publish(self, item: PreparedItem, embedding: torch.Tensor) -> None:
        """Publishes `embedding` [num_rows, width] under `item.key`.

        Raises:
            InternalError: it has another number of rows than preprocessing promised.
            OverloadedError: the pool is full of leased embeddings.
        """
        if embedding.ndim != 2 or embedding.shape[0] != item.num_rows:
            raise InternalError(
                Reason.ENCODE_FAILED, f"the encoder returned shape {tuple(embedding.shape)} for {item.num_rows} rows"
            )
        shape = EmbeddingShape(
            num_rows=item.num_rows, width=embedding.shape[1], dtype=str(embedding.dtype).removeprefix("torch.")
        )
        info = EmbeddingInfo(modality=item.modality, mm_hash=item.mm_hash, shape=shape, content_part=item.content_part)
        room = self._pool.reserve(item.key, info)
        if room is None:
            return  # an encode that its clients had given up on was finished all the same
        with room as rows:
            if embedding.nbytes <= _SMALL_BYTES and embedding.is_cpu and embedding.is_contiguous():
                ctypes.memmove(ctypes.byref(ctypes.c_char.from_buffer(rows)), embedding.data_ptr(), rows.nbytes)
            else:
                torch.frombuffer(rows, dtype=embedding.dtype).view(embedding.shape).copy_(embedding)
