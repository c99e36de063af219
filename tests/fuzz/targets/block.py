"""Blocks as they lie in a region: accepted are those, and only those, that the ticket and the lease promised."""

import struct
import zlib
from random import Random

from producer.wire.block import BlockError, BlockIdentity, EmbeddingShape, read_block, write_block
from producer.wire.contract import DTYPE_BYTES
from tests.fuzz.checks import check_said, expect
from tests.fuzz.mutate import AnyBytes

_PROMISE = struct.Struct("<BBBQQ32s")  # dtype, rows, width, epoch, generation, key
_CHECKED_BYTES = 100  # of the header: fields and checksum
_FIELDS_BYTES = 96


def target(data: bytes) -> None:
    """A promise, then the block that came."""
    if len(data) < _PROMISE.size:
        return
    shape, identity = _promise(data)
    block = data[_PROMISE.size :]
    try:
        rows = read_block(memoryview(block), identity, shape)
    except BlockError as error:
        check_said(str(error))
        return
    expect(rows.nbytes == shape.payload_bytes, "rows of another size are accepted")
    written = bytearray(shape.block_bytes)
    write_block(memoryview(written), identity, shape, rows)
    trailer = len(block) - 64
    expect(block[:_CHECKED_BYTES] == written[:_CHECKED_BYTES], "another header than the promised one is accepted")
    expect(block[trailer : trailer + 8] == written[trailer : trailer + 8], "another trailer is accepted")


def mutate(data: bytes, most: int, dice: Random, any_bytes: AnyBytes) -> bytes:
    """Half of what comes out has a checksum that fits its bytes."""
    made = bytearray(any_bytes(data, most))
    start = _PROMISE.size
    if len(made) >= start + 192 and dice.random() < 0.5:
        header, rows = made[start : start + _FIELDS_BYTES], made[start + 128 : -64]
        struct.pack_into("<I", made, start + _FIELDS_BYTES, zlib.crc32(rows, zlib.crc32(header)))
    return bytes(made)


def seeds() -> dict[str, bytes]:
    promises = [
        _PROMISE.pack(dtype, rows, width, 1, 7, bytes(range(32))) for dtype, rows, width in [(0, 1, 1), (2, 3, 4)]
    ]
    return {f"{number}": promise + _block(promise) for number, promise in enumerate(promises)}


def _promise(data: bytes) -> tuple[EmbeddingShape, BlockIdentity]:
    dtype, rows, width, epoch, generation, key = _PROMISE.unpack_from(data)
    name = tuple(DTYPE_BYTES)[dtype % len(DTYPE_BYTES)]
    shape = EmbeddingShape(num_rows=1 + rows % 8, width=1 + width % 8, dtype=name)
    return shape, BlockIdentity(key=key, epoch=epoch, generation=generation)


def _block(promise: bytes) -> bytes:
    shape, identity = _promise(promise)
    block = bytearray(shape.block_bytes)
    write_block(memoryview(block), identity, shape, memoryview(bytes(range(shape.payload_bytes))))
    return bytes(block)
