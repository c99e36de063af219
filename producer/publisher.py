"""Step output → embedding pool: checked, copied out, made visible. Runs on the step loop's thread."""

import torch

from producer.core import EmbeddingInfo, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import InternalError
from producer.metrics import Metrics
from producer.runner.guard import is_finite
from producer.wire.block import EmbeddingShape
from producer.wire.contract import Reason


class Publisher:
    """Puts embeddings into `pool`; an embedding that is not as promised is refused, not published."""

    def __init__(self, pool: EmbeddingPool, metrics: Metrics) -> None:
        self._pool = pool
        self._metrics = metrics

    def publish(self, item: PreparedItem, embedding: torch.Tensor) -> None:
        """Publishes `embedding` [num_rows, width] under `item.key`.

        Raises:
            InternalError: it has another number of rows than preprocessing promised, or is not finite.
            OverloadedError: the pool is full of leased embeddings.
        """
        if embedding.ndim != 2 or embedding.shape[0] != item.num_rows:
            raise InternalError(
                Reason.ENCODE_FAILED, f"the encoder returned shape {tuple(embedding.shape)} for {item.num_rows} rows"
            )
        if not is_finite(embedding):
            self._metrics.non_finite.inc()
            raise InternalError(Reason.NON_FINITE_OUTPUT, "the embedding holds NaN or infinity")
        shape = EmbeddingShape(
            num_rows=item.num_rows, width=embedding.shape[1], dtype=str(embedding.dtype).removeprefix("torch.")
        )
        rows = embedding.contiguous().cpu().view(torch.uint8).numpy()
        info = EmbeddingInfo(modality=item.modality, mm_hash=item.mm_hash, shape=shape, content_part=item.content_part)
        self._pool.put(item.key, info, memoryview(rows).cast("B"))
