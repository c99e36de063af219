"""The content key: the identity of an embedding, and the same wherever it is computed."""

import hashlib
from collections.abc import Sequence


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
    digest.update(data)
    return digest.hexdigest()
