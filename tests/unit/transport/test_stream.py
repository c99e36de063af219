"""Blocks over `Fetch`: exactly the block's bytes are written, to its place, whatever a producer sends."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from producer.memory.region import SharedRegion
from producer.transport.base import BlockDescriptor, Endpoint, TransportError
from producer.transport.stream import StreamOutlet, StreamReader
from producer.wire.pb import encoder_cache_pb2 as pb

OFFSET, NUM_BYTES = 4096, 300
BLOCK = BlockDescriptor(
    transport="grpc", lease_id="lease", address=0, num_bytes=NUM_BYTES, generation=1, peer="", peer_metadata=b""
)
DATA = bytes(range(250)) + bytes(50)


class Refused(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.NOT_FOUND

    def details(self) -> str:
        return "it has ended"


class FakeFetch:
    """A stub's `Fetch` that sends `parts`, an error among them is raised. It has no connection and no deadline."""

    def __init__(self, *parts: bytes | Exception) -> None:
        self._parts = parts
        self.asked: list[tuple[pb.FetchRequest, float]] = []
        self.cancelled = False

    def __call__(self, request: pb.FetchRequest, timeout: float) -> Any:
        self.asked.append((request, timeout))
        return self

    def __iter__(self) -> Iterator[pb.FetchResponse]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield pb.FetchResponse(data=part)

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with SharedRegion.create("test", 1 << 14) as region:
        region.view[:] = b"\x55" * region.num_bytes
        yield region


def is_untouched_outside(region: SharedRegion) -> bool:
    outside = bytes(region.view[:OFFSET]) + bytes(region.view[OFFSET + NUM_BYTES :])
    return outside == b"\x55" * len(outside)


@pytest.mark.parametrize("parts", [[DATA], [DATA[:1], DATA[1:299], DATA[299:]], [b"", DATA, b""]])
def test_a_block_lands_at_its_place(region: SharedRegion, parts: list[bytes]) -> None:
    fetch = FakeFetch(*parts)
    StreamReader(region, fetch).read(BLOCK, OFFSET, 5.0)
    assert fetch.asked == [(pb.FetchRequest(lease_id="lease"), 5.0)]
    assert bytes(region.view[OFFSET : OFFSET + NUM_BYTES]) == DATA
    assert is_untouched_outside(region)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([], "the producer sent 0 of 300 bytes"),
        ([DATA[:299]], "the producer sent 299 of 300 bytes"),
        ([DATA, b"x"], "the producer sent more than the block's 300 bytes"),
        ([DATA[:200], DATA], "the producer sent more than the block's 300 bytes"),
        ([Refused()], "NOT_FOUND: it has ended"),
        ([DATA[:200], Refused()], "NOT_FOUND: it has ended"),
    ],
)
def test_anything_else_is_an_error(region: SharedRegion, parts: list[bytes | Exception], sentence: str) -> None:
    """Settled at once, since only the reader itself writes."""
    fetch = FakeFetch(*parts)
    reader = StreamReader(region, fetch)
    with pytest.raises(TransportError, match=sentence) as failed:
        reader.read(BLOCK, OFFSET, 5.0)
    assert failed.value.settled
    assert reader.is_settled(OFFSET)
    assert fetch.cancelled
    assert is_untouched_outside(region)


def test_an_outlet_needs_nothing() -> None:
    outlet = StreamOutlet()
    assert outlet.describe() == Endpoint(base=None, peer="", metadata=b"")
    assert outlet.is_up
    outlet.close()
