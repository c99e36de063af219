"""The first items, which the producer makes itself, so that 'ready' means that an encode works."""

import asyncio

from producer.admission import Admission
from producer.core import ModelInfo, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import ServiceError, UnsupportedModelError
from producer.preprocess import Preprocessor

_TIMEOUT_S = 120.0


async def prepare_sample(preprocessor: Preprocessor, model: ModelInfo, modality: str) -> PreparedItem:
    """An item of `modality`, preprocessed.

    Raises:
        UnsupportedModelError: it cannot be.
    """
    from producer.decode import sample

    try:
        return await asyncio.wait_for(preprocessor.prepare("", sample(modality)), _TIMEOUT_S)
    except (ServiceError, asyncio.TimeoutError) as error:
        raise _cannot_encode(model, modality, error) from error


async def encode_samples(admission: Admission, pool: EmbeddingPool, model: ModelInfo) -> None:
    """Encodes an item of each modality through every stage, and compares its width with the language model's.

    Raises:
        UnsupportedModelError: one cannot be encoded, or has another width.
    """
    from producer.decode import sample

    for modality, expected in model.widths.items():
        try:
            lease = await asyncio.wait_for(admission.encode(sample(modality)), _TIMEOUT_S)
        except (ServiceError, asyncio.TimeoutError) as error:
            raise _cannot_encode(model, modality, error) from error
        pool.release(lease.lease_id)
        width = lease.info.shape.width
        if width != expected:
            raise UnsupportedModelError(
                f"model {model.model}: its {modality} embeddings have {width} elements a row, its language model takes"
                f" {expected}"
            )


def _cannot_encode(model: ModelInfo, modality: str, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(f"model {model.model}: a test {modality} cannot be encoded: {error}")
