"""The content key: the identity of an embedding, and the same wherever it is computed."""

import hashlib
from collections.abc import Sequence

_PIECE_BYTES = 2047
"""Of more at once, hashlib lets go of Python's lock, which a busy thread may then have to wait for."""
_SHORT_BYTES = 1 << 16
"""Less is hashed sooner than the lock comes back: in 0.1 ms."""


def content_key(
    fingerprint: str, modality: str, data: bytes, decoded: tuple[Sequence[int], float] | None = None
) -> str:
    """64 hex digits (SHA-256) over all that decides an embedding's bytes.

    Args:
        fingerprint: of the model, its processor and their settings, 64 hex digits.
        modality: vLLM's name of the kind, so that one file read as two kinds has two keys.
        data: the media file, or what a client decoded of one.
        decoded: shape and rate of the latter.
    """
    kind = modality if decoded is None else f"{modality}/{'x'.join(map(str, decoded[0]))}/{decoded[1]!r}"
    digest = hashlib.sha256(f"ec-producer key 1|{fingerprint}|{kind}|{len(data)}|".encode())
    if len(data) > _SHORT_BYTES:
        digest.update(data)
    else:
        for start in range(0, len(data), _PIECE_BYTES):
            digest.update(data[start : start + _PIECE_BYTES])
    return digest.hexdigest()
