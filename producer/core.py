"""The records that flow through the stages, in the order in which they appear."""

from dataclasses import dataclass, field
from typing import Any

from producer.wire.block import EmbeddingShape

ContentPart = dict[str, Any]
"""What stands for a media item in a chat request to vLLM, but for its uuid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedForm:
    """What bytes are that a client decoded: row-major uint8 RGB, or float32 samples of one channel."""

    shape: tuple[int, ...]
    """Image: height, width, 3. Video: frames, height, width, 3. Audio: samples."""
    rate_hz: float
    """Frames or samples a second; 0 for an image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaItem:
    """What a client sent: an encoded media file of `modality`, or what it decoded of one."""

    modality: str
    data: bytes = field(repr=False)
    decoded: DecodedForm | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedItem:
    """What the encoder needs of an item. `inputs` is opaque to all but preprocessing and the runner."""

    key: str
    modality: str
    num_rows: int
    content_part: ContentPart
    inputs: Any = field(repr=False)
    mm_hash: str = ""
    waited_s: float = 0.0
    """Seconds that it waited for a preprocessing process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingInfo:
    """What is known of a published embedding, but for its bytes."""

    modality: str
    shape: EmbeddingShape
    content_part: ContentPart
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
    widths: dict[str, int]
    """By modality that is served, the elements of a row that the language model takes."""
    versions: dict[str, str]
    attention_backend: str
