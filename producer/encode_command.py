"""`ec-producer encode`: a client for people. Needs no vLLM and no GPU."""

import sys
from pathlib import Path
from time import perf_counter

from consumer_shim.channel import PLAIN, ChannelSecurity
from consumer_shim.client import Producer, ProducerError
from producer.safetensors_file import pack
from producer.wire.block import EmbeddingShape
from producer.wire.modality import modality_number
from producer.wire.pb import encoder_cache_pb2 as pb

_SUFFIXES = {
    "video": (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv", ".3gp"),
    "audio": (".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".wma"),
}


def encode_files(
    files: list[Path], address: str, folder: Path | None, timeout_s: float, security: ChannelSecurity = PLAIN
) -> int:
    """Encodes `files`, prints a line for each, writes embeddings to `folder` if there is one.

    Returns:
        0, or 1 where a file could not be encoded.
    """
    producer = Producer(address, security=security)
    failed = False
    print(f"{'rows':>6} {'width':>6} {'dtype':9} {'ms':>8}  key / file")
    for path in files:
        try:
            _encode_file(producer, path, folder, timeout_s)
        except (OSError, ProducerError, ValueError) as error:
            failed = True
            print(f"{path}: {error}", file=sys.stderr)
    producer.close()
    return int(failed)


def _encode_file(producer: Producer, path: Path, folder: Path | None, timeout_s: float) -> None:
    item = pb.MediaItem(modality=_modality(path), data=path.read_bytes())
    start = perf_counter()
    (outcome,) = producer.encode([item], timeout_s)
    elapsed_ms = (perf_counter() - start) * 1000
    if isinstance(outcome, ProducerError):
        raise outcome
    print(f"{outcome.num_rows:6} {outcome.width:6} {outcome.dtype:9} {elapsed_ms:8.1f}  {outcome.key}  {path}")
    if folder is None:
        producer.release(outcome.lease_id, timeout_s)
    else:
        _write(folder, outcome, producer.fetch(outcome, timeout_s))


def _modality(path: Path) -> pb.Modality.ValueType:
    """By the file's name; an image where that says nothing."""
    suffix = path.suffix.lower()
    return modality_number(next((kind for kind, suffixes in _SUFFIXES.items() if suffix in suffixes), "image"))


def _write(folder: Path, ticket: pb.Ticket, rows: bytes) -> None:
    """One tensor "embedding" [num_rows, width], in the safetensors format."""
    shape = EmbeddingShape(num_rows=ticket.num_rows, width=ticket.width, dtype=ticket.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{ticket.key}.safetensors").write_bytes(pack("embedding", shape, rows))
