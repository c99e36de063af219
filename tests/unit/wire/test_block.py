"""The block: what was written is read, and nothing else is."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.wire.block import (
    HEADER_BYTES,
    TRAILER_BYTES,
    BlockError,
    BlockIdentity,
    EmbeddingShape,
    invalidate_block,
    read_block,
    write_block,
)
from producer.wire.contract import DTYPE_BYTES

IDENTITY = BlockIdentity(key=bytes(range(32)), epoch=0x1122334455667788, generation=7)
SHAPE = EmbeddingShape(num_rows=3, width=5, dtype="bfloat16")
FIELDS_BYTES = 100
"""Header fields with the checksum; the rest of the header is padding."""

uint64 = st.integers(0, 2**64 - 1)
identities = st.builds(BlockIdentity, key=st.binary(min_size=32, max_size=32), epoch=uint64, generation=uint64)
shapes = st.builds(
    EmbeddingShape, num_rows=st.integers(1, 6), width=st.integers(1, 6), dtype=st.sampled_from(sorted(DTYPE_BYTES))
)


def written(identity: BlockIdentity = IDENTITY, shape: EmbeddingShape = SHAPE, rows: bytes = b"") -> bytearray:
    block = bytearray(b"\xee" * shape.block_bytes)
    write_block(memoryview(block), identity, shape, memoryview(rows or bytes(range(shape.payload_bytes))))
    return block


def test_sizes() -> None:
    assert SHAPE.payload_bytes == 3 * 5 * 2
    assert SHAPE.block_bytes == HEADER_BYTES + 30 + TRAILER_BYTES


@given(identities, shapes, st.data())
def test_what_was_written_is_read(identity: BlockIdentity, shape: EmbeddingShape, data: st.DataObject) -> None:
    rows = data.draw(st.binary(min_size=shape.payload_bytes, max_size=shape.payload_bytes))
    block = written(identity, shape, rows)
    assert bytes(read_block(memoryview(block), identity, shape)) == rows


def test_rows_are_a_view_not_a_copy() -> None:
    block = written()
    rows = read_block(memoryview(block), IDENTITY, SHAPE)
    block[HEADER_BYTES] = 99
    assert rows[0] == 99


def test_nothing_of_the_memory_before_is_left() -> None:
    assert b"\xee" not in written()


@pytest.mark.parametrize(
    ("promised", "message"),
    [
        ({"epoch": 1}, "epoch is 1234605616436508552, expected 1"),
        ({"generation": 8}, "generation is 7, expected 8"),
        ({"key": bytes(32)}, f"key is {bytes(range(32)).hex()}, expected {'00' * 32}"),
        ({"num_rows": 5, "width": 3}, "rows is 3, expected 5"),
        ({"dtype": "float16"}, f"dtype is {b'bfloat16'.hex()}"),
    ],
)
def test_another_block_than_promised_is_named(promised: dict[str, object], message: str) -> None:
    identity = replace(IDENTITY, **{name: value for name, value in promised.items() if hasattr(IDENTITY, name)})
    shape = replace(SHAPE, **{name: value for name, value in promised.items() if hasattr(SHAPE, name)})
    with pytest.raises(BlockError, match=message):
        read_block(memoryview(written()), identity, shape)


@pytest.mark.parametrize("num_bytes", [0, HEADER_BYTES, SHAPE.block_bytes - 1, SHAPE.block_bytes + 1])
def test_another_length_is_refused(num_bytes: int) -> None:
    block = written().ljust(num_bytes, b"\0")[:num_bytes]
    with pytest.raises(BlockError, match=f"has {num_bytes} bytes, expected {SHAPE.block_bytes}"):
        read_block(memoryview(block), IDENTITY, SHAPE)


def test_a_freed_block_is_refused() -> None:
    block = written()
    invalidate_block(memoryview(block))
    with pytest.raises(BlockError, match="magic"):
        read_block(memoryview(block), IDENTITY, SHAPE)


def test_memory_that_never_was_a_block_is_refused() -> None:
    with pytest.raises(BlockError, match="magic"):
        read_block(memoryview(bytes(SHAPE.block_bytes)), IDENTITY, SHAPE)


CHECKED = [
    *range(FIELDS_BYTES),
    *range(HEADER_BYTES, HEADER_BYTES + SHAPE.payload_bytes),
    *range(SHAPE.block_bytes - TRAILER_BYTES, SHAPE.block_bytes - TRAILER_BYTES + 8),
]


@given(st.sampled_from(CHECKED), st.integers(1, 255))
def test_one_wrong_byte_is_found(place: int, difference: int) -> None:
    block = written()
    block[place] ^= difference
    with pytest.raises(BlockError):
        read_block(memoryview(block), IDENTITY, SHAPE)


def test_every_place_counts() -> None:
    """As above, for one difference at each place: the property may not have tried them all."""
    for place in CHECKED:
        block = written()
        block[place] ^= 0x80
        with pytest.raises(BlockError):
            read_block(memoryview(block), IDENTITY, SHAPE)


@given(
    st.binary(min_size=SHAPE.payload_bytes, max_size=SHAPE.payload_bytes),
    st.binary(min_size=SHAPE.payload_bytes, max_size=SHAPE.payload_bytes),
    st.lists(st.integers(0, SHAPE.block_bytes), max_size=6),
)
def test_a_mixture_of_two_generations_is_never_taken_for_either(old: bytes, new: bytes, cuts: list[int]) -> None:
    """A read overtaken by a rewrite: stretches of both, in any pattern. What passes must be what was promised."""
    old_identity, new_identity = replace(IDENTITY, generation=1), replace(IDENTITY, generation=2)
    sources = [written(old_identity, SHAPE, old), written(new_identity, SHAPE, new)]
    places = [0, *sorted(cuts), SHAPE.block_bytes]
    mixture = bytearray()
    for turn, (start, end) in enumerate(itertools.pairwise(places)):
        mixture += sources[turn % 2][start:end]
    for identity, rows in ((old_identity, old), (new_identity, new)):
        try:
            found = read_block(memoryview(mixture), identity, SHAPE)
        except BlockError:
            continue
        assert bytes(found) == rows


def test_a_rewrite_torn_at_any_place_is_found() -> None:
    old, new = written(replace(IDENTITY, generation=1)), written(replace(IDENTITY, generation=2), SHAPE, b"n" * 30)
    last_written = SHAPE.block_bytes - TRAILER_BYTES + 8  # padding follows
    for cut in range(1, last_written):
        torn = new[:cut] + old[cut:]
        for generation in (1, 2):
            if torn not in (old, new):
                with pytest.raises(BlockError):
                    read_block(memoryview(torn), replace(IDENTITY, generation=generation), SHAPE)


def test_writing_refuses_memory_or_rows_of_another_size() -> None:
    rows = memoryview(bytes(SHAPE.payload_bytes))
    with pytest.raises(AssertionError):
        write_block(memoryview(bytearray(SHAPE.block_bytes - 1)), IDENTITY, SHAPE, rows)
    with pytest.raises(AssertionError):
        write_block(memoryview(bytearray(SHAPE.block_bytes)), IDENTITY, SHAPE, rows[:-1])
