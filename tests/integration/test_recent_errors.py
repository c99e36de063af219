"""What the status page tells of errors, as they come through the API: their kinds, and nothing of what was sent."""

import dataclasses
import json

import grpc
import pytest

from producer.wire.contract import WIRE_VERSION
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.integration.rig import Rig, image


def kinds(rig: Rig) -> list[tuple[str, str, str, int]]:
    return [(error.scope, error.code, error.reason, error.count) for error in rig.errors.newest_first()]


async def test_an_items_error(rig: Rig) -> None:
    await rig.encode(b"bad 1", b"fine", b"bad 2")
    assert kinds(rig) == [("item", "INVALID_ARGUMENT", "MEDIA_UNREADABLE", 2)]


async def test_an_unforeseen_error(rig: Rig) -> None:
    await rig.encode(b"unforeseen")
    assert kinds(rig) == [("item", "INTERNAL", "ENCODE_FAILED", 1)]


async def test_a_call_that_is_refused(rig: Rig) -> None:
    for request in (pb.EncodeRequest(), pb.EncodeRequest(items=[image(b"photo")], fingerprint="secret")):
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.stub.Encode(request)
    ticket = await rig.ticket(b"photo")
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.stub.Acquire(pb.AcquireRequest(key=ticket.key, epoch="secret", wire_version=WIRE_VERSION))
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.stub.Fetch(pb.FetchRequest(lease_id="secret")).read()
    assert kinds(rig) == [
        ("call", "NOT_FOUND", "LEASE_ENDED", 1),
        ("call", "FAILED_PRECONDITION", "EPOCH_MISMATCH", 1),
        ("call", "FAILED_PRECONDITION", "FINGERPRINT_MISMATCH", 1),
        ("call", "INVALID_ARGUMENT", "MALFORMED_REQUEST", 1),
    ]
    assert "secret" not in json.dumps([dataclasses.asdict(error) for error in rig.errors.newest_first()])


async def test_what_succeeds_is_no_error(rig: Rig) -> None:
    await rig.fetch(await rig.ticket(b"photo"))
    assert kinds(rig) == []
