"""The records that flow through the stages, in the order in which they appear."""

from dataclasses import dataclass, field
from typing import Any

from producer.wire.block import EmbeddingShape

Metadata = dict[str, "NumberArray"]
"""A model's placeholder metadata by field, e.g. `image_grid_thw`."""


@dataclass(frozen=True, slots=True)
class NumberArray:
    """A small array of numbers: `shape` () is a scalar; `values` is row-major, all int or all float."""

    shape: tuple[int, ...]
    values: tuple[int | float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaItem:
    """What a client sent: an encoded media file of `modality`."""

    modality: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedItem:
    """What the encoder needs of an item. `inputs` is opaque to all but preprocessing and the runner."""

    key: str
    modality: str
    num_rows: int
    metadata: Metadata
    inputs: Any = field(repr=False)
    mm_hash: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingInfo:
    """What is known of a published embedding, but for its bytes."""

    modality: str
    shape: EmbeddingShape
    metadata: Metadata
    mm_hash: str = ""
    """vLLM's own hash of the media; another than the content key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A pin on an embedding until release or `expires_at_s` (the pool's clock), whichever is first."""

    lease_id: str  # 32 hex digits
    key: str
    transport: str
    info: EmbeddingInfo
    offset: int
    num_bytes: int
    generation: int
    expires_at_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What the runner found out about the model it loaded."""

    model: str
    fingerprint: str  # 64 hex digits
    dtype: str
    input_width: int
    """Elements of a row that the language model takes."""
    modalities: tuple[str, ...]
    versions: dict[str, str]
    attention_backend: str
