"""The fingerprint: one hash over everything but the media that decides an embedding's bytes.

Weights are read from the checkpoint rather than from the loaded model, which repacks them for its device; so the
fingerprint is the same on every machine. Only the encoder's tensors are read.
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from producer.wire.contract import WIRE_VERSION

_CONFIG_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_MAX_HEADER_BYTES = 100 << 20


def fingerprint(folder: Path, is_encoder_weight: Callable[[str], bool], settings: Mapping[str, Any]) -> str:
    """64 hex digits over the encoder's weights, the model's configuration files and `settings`.

    Args:
        folder: the checkpoint, safetensors or PyTorch files.
        is_encoder_weight: whether a checkpoint tensor of that name belongs to the encoder.
        settings: what else decides the bytes, JSON-serialisable.

    Raises:
        ValueError: `folder` holds no weights, or a file that is not what its name says.
    """
    identity = {
        "wire_version": WIRE_VERSION,
        "weights": _weights_digest(folder, is_encoder_weight),
        "files": {name: json.loads((folder / name).read_bytes()) for name in _CONFIG_FILES if (folder / name).exists()},
        "settings": dict(settings),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _weights_digest(folder: Path, is_encoder_weight: Callable[[str], bool]) -> str:
    """Hash of all encoder tensors by name, whatever files they are spread over."""
    tensors: dict[str, str] = {}
    files = sorted(folder.glob("*.safetensors"))
    for path in _with_encoder_weights(folder, files, is_encoder_weight):
        tensors |= _tensor_digests(path, is_encoder_weight)
    if not files:
        others = sorted(path for pattern in ("*.bin", "*.pt", "*.gguf") for path in folder.glob(pattern))
        tensors = {path.name: blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() for path in others}
    if not tensors:
        raise ValueError(f"{folder} holds no weights of an encoder")
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()


def _with_encoder_weights(folder: Path, files: list[Path], is_encoder_weight: Callable[[str], bool]) -> list[Path]:
    """Those of `files` that the checkpoint's index does not say are without encoder weights."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return files
    try:
        places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        others = set(places.values()) - {place for name, place in places.items() if is_encoder_weight(name)}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{index.name} is not an index of safetensors files") from None
    return [path for path in files if path.name not in others]


def _tensor_digests(path: Path, is_encoder_weight: Callable[[str], bool]) -> dict[str, str]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            (length,) = struct.unpack_from("<Q", data)
            header = json.loads(data[8 : 8 + min(length, _MAX_HEADER_BYTES)])
            return {
                name: _tensor_digest(data, 8 + length, entry)
                for name, entry in header.items()
                if name != "__metadata__" and is_encoder_weight(name)
            }
    except (ValueError, TypeError, KeyError, AttributeError, struct.error):
        raise ValueError(f"{path.name} is not a safetensors file, or not a whole one") from None


def _tensor_digest(data: mmap.mmap, base: int, entry: Mapping[str, Any]) -> str:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(data) - base:
        raise ValueError
    digest = blake3(f"{entry['dtype']}{entry['shape']}".encode(), max_threads=blake3.AUTO)
    with memoryview(data) as view, view[base + start : base + end] as tensor:
        digest.update(tensor)
    return digest.hexdigest()
