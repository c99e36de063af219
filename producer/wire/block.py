"""The block: one embedding as it lies in a region and travels over any transport.

    header (128 bytes) | rows, row-major | trailer (64 bytes)

A transport's word that a read is done proves nothing: the bytes may be torn, stale or somebody else's. So the reader
compares header, trailer and checksum with what its ticket and lease promised.
"""

import struct
import zlib
from dataclasses import dataclass

from producer.wire.contract import DTYPE_BYTES, WIRE_VERSION

HEADER_BYTES = 128
TRAILER_BYTES = 64
MAGIC = b"ECPBLOCK"
_FIELDS = struct.Struct("<8sIIQQ32sII16sQ")  # all but the checksum, which covers them and the rows
_CHECKSUM = struct.Struct("<I")
_TRAILER = struct.Struct("<Q")


class BlockError(ValueError):
    """The bytes read are not the block that was promised; the message names the first field that differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingShape:
    """Shape of an embedding: `num_rows` × `width` elements of `dtype`, row-major."""

    num_rows: int
    width: int
    dtype: str

    @property
    def payload_bytes(self) -> int:
        return self.num_rows * self.width * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes + TRAILER_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockIdentity:
    """Whose block it is: content key, the producer's life (`epoch`) and the block's own (`generation`)."""

    key: bytes  # 32 bytes
    epoch: int
    generation: int


def write_block(block: memoryview, identity: BlockIdentity, shape: EmbeddingShape, rows: memoryview) -> None:
    """Writes header, `rows` and trailer into `block`, which has `shape.block_bytes` writable bytes.

    Args:
        block: the memory to fill, format "B".
        identity: key, epoch and generation to write.
        shape: what `rows` holds.
        rows: the embedding's bytes, exactly `shape.payload_bytes`.
    """
    assert rows.nbytes == shape.payload_bytes, (rows.nbytes, shape)
    rows_of(block, shape)[:] = rows
    seal_block(block, identity, shape)


def rows_of(block: memoryview, shape: EmbeddingShape) -> memoryview:
    """The part of `block` that holds the rows, for who writes them there; `seal_block` makes a block of it."""
    assert block.nbytes == shape.block_bytes, (block.nbytes, shape)
    return block[HEADER_BYTES : HEADER_BYTES + shape.payload_bytes]


def seal_block(block: memoryview, identity: BlockIdentity, shape: EmbeddingShape) -> None:
    """Writes header and trailer around rows that lie in `block` already."""
    rows = rows_of(block, shape)
    fields = _pack(identity, shape)
    block[HEADER_BYTES + rows.nbytes :] = _TRAILER.pack(identity.generation).ljust(TRAILER_BYTES, b"\0")
    checksum = _CHECKSUM.pack(zlib.crc32(rows, zlib.crc32(fields)))
    block[:HEADER_BYTES] = (fields + checksum).ljust(HEADER_BYTES, b"\0")


def read_block(block: memoryview, identity: BlockIdentity, shape: EmbeddingShape) -> memoryview:
    """Returns the rows of `block`, a view of `shape.payload_bytes` bytes, once all of it is as promised.

    Raises:
        BlockError: length, header, trailer or checksum differ.
    """
    if block.nbytes != shape.block_bytes:
        raise BlockError(f"the block has {block.nbytes} bytes, expected {shape.block_bytes}")
    expected = _pack(identity, shape)
    found = bytes(block[: _FIELDS.size])
    if found != expected:
        raise BlockError(_first_difference(found, expected))
    rows = block[HEADER_BYTES : HEADER_BYTES + shape.payload_bytes]
    (trailer,) = _TRAILER.unpack_from(block, HEADER_BYTES + shape.payload_bytes)
    if trailer != identity.generation:
        raise BlockError(f"the trailer has generation {trailer}, expected {identity.generation}: torn block")
    (checksum,) = _CHECKSUM.unpack_from(block, _FIELDS.size)
    if checksum != zlib.crc32(rows, zlib.crc32(found)):
        raise BlockError("the checksum differs: torn or corrupted block")
    return rows


def invalidate_block(block: memoryview) -> None:
    """Spoils the header, so that a reader of freed memory cannot mistake it for a block."""
    block[: len(MAGIC)] = bytes(len(MAGIC))


def _pack(identity: BlockIdentity, shape: EmbeddingShape) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        WIRE_VERSION,
        HEADER_BYTES,
        identity.epoch,
        identity.generation,
        identity.key,
        shape.num_rows,
        shape.width,
        shape.dtype.encode().ljust(16, b"\0"),
        shape.payload_bytes,
    )


def _first_difference(found: bytes, expected: bytes) -> str:
    names = ("magic", "wire version", "header bytes", "epoch", "generation", "key", "rows", "width", "dtype", "bytes")
    for name, got, want in zip(names, _FIELDS.unpack(found), _FIELDS.unpack(expected), strict=True):
        if got != want:
            return f"the block's {name} is {_show(got)}, expected {_show(want)}"
    return "the block's header differs"


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
