"""The service over a real port, called by the shim's own client: outcomes, refusals, leases, and what is dropped."""

import asyncio
import json
import struct
from random import Random

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from consumer_shim.client import ProducerError, outcomes
from producer.core import DecodedForm, MediaItem
from producer.wire.block import BlockIdentity, EmbeddingShape, read_block
from producer.wire.content_key import content_key
from producer.wire.contract import FETCH_CHUNK_BYTES, WIRE_VERSION
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.integration.rig import (
    EPOCH,
    FINGERPRINT,
    MAX_ITEM_BYTES,
    MAX_ITEMS,
    SETTINGS,
    WAIT_S,
    WIDTH,
    Rig,
    bytes_of,
    eventually,
    image,
)

LEASE_END_S = 70.0
"""A lease of the rig with the pool's margin."""


def error_of(outcome: object) -> tuple[grpc.StatusCode, str]:
    assert isinstance(outcome, ProducerError), outcome
    return outcome.code, outcome.reason


async def call_error(call: "grpc.aio.UnaryUnaryCall[object, object]") -> tuple[grpc.StatusCode, str]:
    """The code and reason that a whole call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of(ProducerError.from_call(caught.value))


def details_of(status: status_pb2.Status) -> tuple[dict[str, str], bool]:
    """An item's error: the metadata of its ErrorInfo, and whether it says when to come back."""
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "ec-producer"
    retry = any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
    return dict(info.metadata), retry


def acquire(ticket: pb.Ticket, **changes: object) -> pb.AcquireRequest:
    fields = {"key": ticket.key, "epoch": ticket.epoch, "lease_id": ticket.lease_id}
    return pb.AcquireRequest(**{**fields, "transport": "grpc", "wire_version": WIRE_VERSION, **changes})


# Encode


async def test_an_item_gets_a_ticket(rig: Rig) -> None:
    ticket = await rig.ticket(b"photo")
    assert ticket.key == content_key(FINGERPRINT, "image", b"photo")
    assert (ticket.modality, ticket.num_rows, ticket.width, ticket.dtype) == (pb.MODALITY_IMAGE, 5, WIDTH, "float32")
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 1, 5]}, "uuid": ticket.key}
    assert json.loads(ticket.content_part) == part
    assert (ticket.epoch, ticket.address) == (f"{EPOCH:016x}", rig.address)
    assert ticket.lease_ttl.ToSeconds() == 60


async def test_each_item_has_its_own_outcome(rig: Rig) -> None:
    first, bad, third = await rig.encode(b"first", b"bad", b"third")
    assert isinstance(first, pb.Ticket)
    assert isinstance(third, pb.Ticket)
    assert (first.num_rows, first.key != third.key) == (5, True)
    assert error_of(bad) == (grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_UNREADABLE")
    assert str(bad) == "the image cannot be decoded"
    assert (rig.sample("items_total", code="OK"), rig.sample("items_total", code="INVALID_ARGUMENT")) == (2, 1)


async def test_an_items_error_says_which_item(rig: Rig) -> None:
    response = await rig.begin(b"fine", b"bad one", b"bad two")
    assert [outcome.WhichOneof("outcome") for outcome in response.outcomes] == ["ticket", "error", "error"]
    assert [details_of(outcome.error)[0]["item_index"] for outcome in response.outcomes[1:]] == ["1", "2"]


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (pb.MediaItem(modality=pb.MODALITY_IMAGE), "MEDIA_EMPTY"),
        (pb.MediaItem(data=b"photo"), "UNSUPPORTED_MODALITY"),
        (pb.MediaItem(modality=pb.MODALITY_VIDEO, data=b"video"), "UNSUPPORTED_MODALITY"),
        (pb.MediaItem(modality=99, data=b"photo"), "UNSUPPORTED_MODALITY"),
        (image(b"https://example.org/cat.png"), "MEDIA_REFUSED"),
        (image(bytes(MAX_ITEM_BYTES + 1)), "MEDIA_TOO_LARGE"),
    ],
    ids=["empty", "unspecified", "video", "unknown", "URL", "large"],
)
async def test_a_refused_item_voids_no_other(rig: Rig, item: pb.MediaItem, reason: str) -> None:
    refused, fine = await asyncio.to_thread(rig.client.encode, [item, image(b"fine")], 60)
    assert error_of(refused) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert isinstance(fine, pb.Ticket)


async def test_an_unforeseen_error_voids_no_other(rig: Rig) -> None:
    unforeseen, fine = await rig.encode(b"unforeseen", b"fine")
    assert error_of(unforeseen) == (grpc.StatusCode.INTERNAL, "ENCODE_FAILED")
    assert isinstance(fine, pb.Ticket)


@pytest.mark.parametrize("num_items", [0, MAX_ITEMS + 1])
async def test_too_many_items_or_none_fail_the_call(rig: Rig, num_items: int) -> None:
    error = await call_error(rig.begin(*(b"%d" % number for number in range(num_items))))
    assert error == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")
    assert rig.device.steps == []


async def test_another_fingerprint_fails_the_call(rig: Rig) -> None:
    call = rig.stub.Encode(pb.EncodeRequest(items=[image(b"photo")], fingerprint="0" * 64))
    assert await call_error(call) == (grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH")
    same = await rig.stub.Encode(pb.EncodeRequest(items=[image(b"photo")], fingerprint=FINGERPRINT))
    assert same.outcomes[0].HasField("ticket")


async def test_an_embedding_that_is_not_finite_is_not_published(rig: Rig) -> None:
    (outcome,) = await rig.encode(b"not finite")
    assert error_of(outcome) == (grpc.StatusCode.INTERNAL, "NON_FINITE_OUTPUT")
    assert rig.pool.store.num_blocks == 0


# Settings that a client expects


PROCESSING = json.dumps(SETTINGS["mm_processor_kwargs"])


def expecting(**settings: str) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=[image(b"photo")], settings=settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mm_processor_kwargs": PROCESSING},
        {"mm_processor_kwargs": '{ "name":"\\u00fc",\n"size": {"b":[2,0.5], "a":1} }'},
        {"mm_processor_kwargs": json.dumps(SETTINGS["mm_processor_kwargs"], ensure_ascii=False, indent=2)},
        {"media_io_kwargs": "{}"},
        {"media_io_kwargs": " { } ", "mm_processor_kwargs": PROCESSING},
    ],
    ids=["none named", "same", "other order and escapes", "other layout", "empty", "both"],
)
async def test_equal_settings_pass_however_they_are_written(rig: Rig, settings: dict[str, str]) -> None:
    response = await rig.stub.Encode(expecting(**settings))
    assert response.outcomes[0].HasField("ticket")


@pytest.mark.parametrize(
    ("settings", "own", "expected"),
    [
        ({"media_io_kwargs": '{"video": {"fps": 1}}'}, "{}", '{"video": {"fps": 1}}'),
        ({"mm_processor_kwargs": "{}"}, '"a": 1', "and {} at its client"),
        ({"mm_processor_kwargs": PROCESSING.replace("[2, 0.5]", "[0.5, 2]")}, "[2, 0.5]", "[0.5, 2]"),
        ({"mm_processor_kwargs": PROCESSING, "media_io_kwargs": '{"image": {}}'}, "{}", '{"image": {}}'),
        ({"media_io_kwargs": ""}, "{}", " at its client"),
        ({"media_io_kwargs": "{"}, "{}", "and { at its client"),
        ({"media_io_kwargs": "{} {}"}, "{}", "and {} {} at its client"),
        ({"media_io_kwargs": "[]"}, "{}", "and [] at its client"),
        ({"media_io_kwargs": "null"}, "{}", "and null at its client"),
        ({"media_io_kwargs": "[" * 100_000}, "{}", "[[[["),
        ({"media_io_kwargs": "1" * 100_000}, "{}", "1111"),
        ({"media_io_kwargs": "ü€😀" * 10_000}, "{}", "ü€😀"),
        ({"nonsense": '{"a": 1}'}, "nonsense is {}", '{"a": 1}'),
        ({"x" * 100_000: '{"a": 1}'}, "xxx is {}", '{"a": 1}'),
    ],
    ids=[
        *("another value", "less", "another order of a list", "one of two", "empty", "half", "two", "a list", "null"),
        *("too deep", "a number without end", "no JSON at length", "unknown", "unknown at length"),
    ],
)
async def test_other_settings_fail_the_call_and_both_are_said(
    rig: Rig, settings: dict[str, str], own: str, expected: str
) -> None:
    """However long: the sentence travels in a header, and those have a limit."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.stub.Encode(expecting(**settings))
    error = ProducerError.from_call(caught.value)
    assert error_of(error) == (grpc.StatusCode.FAILED_PRECONDITION, "SETTINGS_MISMATCH")
    name = next(name for name in settings if settings[name] != PROCESSING)
    assert str(error).startswith(name[:64])
    assert own in str(error).split("at the encoder service")[0]
    assert expected in str(error).split("at the encoder service")[1]
    assert (rig.items, rig.pool.num_leases) == ([], 0)


async def test_the_shims_client_names_its_settings(rig: Rig) -> None:
    def encode(settings: dict[str, object]) -> object:
        return rig.client.encode([image(b"photo")], WAIT_S, settings=settings)[0]

    assert isinstance(await asyncio.to_thread(encode, SETTINGS), pb.Ticket)
    assert isinstance(await asyncio.to_thread(encode, {"media_io_kwargs": None}), pb.Ticket)
    with pytest.raises(ProducerError, match=r'media_io_kwargs is \{\} at the encoder service and \{"image"') as caught:
        await asyncio.to_thread(encode, {**SETTINGS, "media_io_kwargs": {"image": {"image_mode": "L"}}})
    assert caught.value.reason == "SETTINGS_MISMATCH"


# What a client decoded


def decoded(modality: pb.Modality.ValueType, data: bytes, *shape: int, rate_hz: float = 0.0) -> pb.MediaItem:
    return pb.MediaItem(modality=modality, decoded=pb.DecodedMedia(shape=shape, data=data, rate_hz=rate_hz))


DECODED = {
    "image": (decoded(pb.MODALITY_IMAGE, b"http:" + bytes(7), 2, 2, 3), (2, 2, 3), 0.0),
    "video": (decoded(pb.MODALITY_VIDEO, bytes(range(24)), 2, 2, 2, 3, rate_hz=0.1), (2, 2, 2, 3), 0.1),
    "audio": (decoded(pb.MODALITY_AUDIO, struct.pack("<3f", 0, 0.5, -1), 3, rate_hz=16000), (3,), 16000.0),
}


@pytest.mark.parametrize("modality", DECODED)
async def test_what_a_client_decoded_is_encoded_and_pulled(modality: str) -> None:
    item, shape, rate_hz = DECODED[modality]
    data = item.decoded.data
    async with Rig(modalities=("image", "video", "audio")) as rig:
        (ticket,) = await asyncio.to_thread(rig.client.encode, [item], WAIT_S)
        assert isinstance(ticket, pb.Ticket), ticket
        assert ticket.key == content_key(FINGERPRINT, modality, data, (shape, rate_hz))
        assert (ticket.modality, ticket.num_rows) == (item.modality, len(data))
        assert json.loads(ticket.content_part)["uuid"] == ticket.key
        form = DecodedForm(shape=shape, rate_hz=rate_hz)
        assert rig.items == [MediaItem(modality=modality, data=data, decoded=form)]
        assert await rig.fetch(ticket) == bytes_of(data)


async def test_a_file_and_what_was_decoded_of_one_share_nothing() -> None:
    """Equal bytes, and another shape and another rate: four embeddings; the same once more: none."""
    data = bytes(range(24))
    items = [
        pb.MediaItem(modality=pb.MODALITY_VIDEO, data=data),
        decoded(pb.MODALITY_VIDEO, data, 2, 2, 2, 3, rate_hz=1),
        decoded(pb.MODALITY_VIDEO, data, 1, 4, 2, 3, rate_hz=1),
        decoded(pb.MODALITY_VIDEO, data, 2, 2, 2, 3, rate_hz=2),
    ]
    async with Rig(modalities=("image", "video", "audio")) as rig:
        tickets = await asyncio.to_thread(rig.client.encode, [*items, *items], WAIT_S)
        assert len({ticket.key for ticket in tickets[:4]}) == 4 == len(rig.items)
        assert [ticket.key for ticket in tickets[:4]] == [ticket.key for ticket in tickets[4:]]


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (decoded(pb.MODALITY_IMAGE, bytes(12), 2, 2, 4), "MEDIA_UNREADABLE"),
        (decoded(pb.MODALITY_IMAGE, bytes(11), 2, 2, 3), "MEDIA_UNREADABLE"),
        (decoded(pb.MODALITY_IMAGE, bytes(12)), "MEDIA_UNREADABLE"),
        (decoded(pb.MODALITY_IMAGE, bytes(12), 2**32 - 1, 2**32 - 1, 3), "MEDIA_UNREADABLE"),
        (decoded(pb.MODALITY_VIDEO, bytes(12), 1, 2, 2, 3), "MEDIA_UNREADABLE"),
        (decoded(pb.MODALITY_VIDEO, bytes(12), 1, 2, 2, 3, rate_hz=float("nan")), "MEDIA_UNREADABLE"),
        (decoded(pb.MODALITY_AUDIO, bytes(12), 3, rate_hz=float("inf")), "MEDIA_UNREADABLE"),
        (decoded(pb.MODALITY_AUDIO, bytes(12), 12, rate_hz=1), "MEDIA_UNREADABLE"),
        (decoded(pb.MODALITY_AUDIO, b"", 0, rate_hz=1), "MEDIA_EMPTY"),
        (decoded(pb.MODALITY_IMAGE, bytes(3 * MAX_ITEM_BYTES), MAX_ITEM_BYTES, 1, 3), "MEDIA_TOO_LARGE"),
        (decoded(pb.MODALITY_UNSPECIFIED, bytes(12), 2, 2, 3), "UNSUPPORTED_MODALITY"),
        (pb.MediaItem(modality=pb.MODALITY_IMAGE, decoded=pb.DecodedMedia()), "MEDIA_EMPTY"),
    ],
    ids=[
        *("channels", "bytes", "no shape", "huge", "rate 0", "NaN", "inf", "bytes of samples", "no samples", "large"),
        *("unspecified", "empty"),
    ],
)
async def test_a_form_that_is_none_voids_no_other(item: pb.MediaItem, reason: str) -> None:
    async with Rig(modalities=("image", "video", "audio")) as rig:
        refused, fine = await asyncio.to_thread(rig.client.encode, [item, image(b"fine")], WAIT_S)
        assert error_of(refused) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert isinstance(fine, pb.Ticket)
        assert [item.data for item in rig.items] == [b"fine"]


async def test_the_last_of_file_and_form_is_what_was_sent() -> None:
    """They share one field: a client that sets both has sent the second."""
    item = pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"file")
    item.decoded.CopyFrom(DECODED["image"][0].decoded)
    async with Rig() as rig:
        await asyncio.to_thread(rig.client.encode, [item], WAIT_S)
        assert [item.decoded is not None for item in rig.items] == [True]


# What is shared


async def test_duplicates_in_a_request_are_encoded_once(rig: Rig) -> None:
    tickets = await rig.encode(b"photo", b"photo", b"photo")
    assert rig.device.steps == [[b"photo"]]
    assert len({ticket.key for ticket in tickets}) == 1
    assert len({ticket.lease_id for ticket in tickets}) == rig.pool.num_leases == 3


async def test_clients_that_ask_for_the_same_at_once_share_an_encode(rig: Rig) -> None:
    first = await rig.begin_step(b"photo")
    second = rig.begin(b"photo")
    await eventually(lambda: rig.sample("items_shared_total", source="in_flight") == 1)
    rig.device.gate.set()
    assert (await first).outcomes[0].ticket.key == (await second).outcomes[0].ticket.key
    assert rig.device.steps == [[b"photo"]]


async def test_requests_that_wait_together_share_a_step(rig: Rig) -> None:
    calls = [await rig.begin_step(b"first"), rig.begin(b"second"), rig.begin(b"third")]
    await eventually(lambda: len(rig.loop._batcher) == 2)
    rig.device.gate.set()
    await asyncio.gather(*calls)
    assert len(rig.device.steps) == 2
    assert sorted(rig.device.steps[1]) == [b"second", b"third"]


# Pulling


async def test_the_embedding_arrives_bit_for_bit(rig: Rig) -> None:
    ticket = await rig.ticket(b"photo")
    assert await rig.fetch(ticket) == bytes_of(b"photo")
    assert (rig.pool.num_leases, rig.pool.store.num_pinned) == (0, 0)
    assert rig.sample("pulls_total", transport="grpc") == 1
    assert rig.sample("pull_bytes_total", transport="grpc") == 128 + 5 * WIDTH * 4 + 64


async def test_a_large_block_comes_in_messages_of_a_mebibyte() -> None:
    data = bytes(range(256)) * 40
    async with Rig(pool_bytes=8 << 20) as rig:
        lease = await rig.stub.Acquire(acquire(await rig.ticket(data)))
        parts = [part.data async for part in rig.stub.Fetch(pb.FetchRequest(lease_id=lease.lease_id))]
    assert [len(part) for part in parts[:-1]] == [FETCH_CHUNK_BYTES] * (len(parts) - 1)
    assert len(parts) == 3
    identity = BlockIdentity(
        key=bytes.fromhex(content_key(FINGERPRINT, "image", data)), epoch=EPOCH, generation=lease.descriptor.generation
    )
    shape = EmbeddingShape(num_rows=len(data), width=WIDTH, dtype="float32")
    assert read_block(memoryview(b"".join(parts)), identity, shape) == bytes_of(data)


async def test_acquiring_replaces_the_tickets_lease(rig: Rig) -> None:
    ticket = await rig.ticket(b"photo")
    lease = await rig.stub.Acquire(acquire(ticket))
    assert lease.lease_id != ticket.lease_id
    assert lease.lease_ttl.ToSeconds() == 60
    assert (lease.descriptor.transport, lease.descriptor.length) == ("grpc", 128 + 5 * WIDTH * 4 + 64)
    assert rig.pool.num_leases == 1
    assert not (await rig.stub.Release(pb.ReleaseRequest(lease_id=ticket.lease_id))).released
    assert [(await rig.stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id))).released for _ in range(2)] == [
        True,
        False,
    ]


async def test_several_leases_are_released_by_one_call(rig: Rig) -> None:
    tickets = [await rig.ticket(name) for name in (b"one", b"two", b"three")]
    first, *more = [ticket.lease_id for ticket in tickets]
    assert (await rig.stub.Release(pb.ReleaseRequest(lease_id=first, lease_ids=more))).released
    assert rig.pool.num_leases == 0
    last = (await rig.ticket(b"one")).lease_id
    assert not (await rig.stub.Release(pb.ReleaseRequest(lease_id=first, lease_ids=[last]))).released
    assert rig.pool.num_leases == 0


async def test_a_call_releases_so_many_leases_at_most(rig: Rig) -> None:
    ticket = await rig.ticket(b"photo")
    with pytest.raises(grpc.aio.AioRpcError, match="has 1025 lease_ids; allowed are at most 1024") as refused:
        await rig.stub.Release(pb.ReleaseRequest(lease_id=ticket.lease_id, lease_ids=["0" * 32] * 1025))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rig.pool.num_leases == 1
    assert not (await rig.stub.Release(pb.ReleaseRequest(lease_ids=["0" * 32] * 1024))).released


async def test_a_ticket_whose_lease_has_ended_is_good_while_the_embedding_is_there(rig: Rig) -> None:
    ticket = await rig.ticket(b"photo")
    rig.now_s += LEASE_END_S
    assert await rig.fetch(ticket) == bytes_of(b"photo")


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"epoch": "0" * 16}, grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_MISMATCH"),
        ({"wire_version": WIRE_VERSION + 1}, grpc.StatusCode.FAILED_PRECONDITION, "WIRE_VERSION_MISMATCH"),
        ({"wire_version": 0}, grpc.StatusCode.FAILED_PRECONDITION, "WIRE_VERSION_MISMATCH"),
        ({"transport": "telepathy"}, grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_TRANSPORT"),
        ({"transport": ""}, grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_TRANSPORT"),
        ({"transport": "down"}, grpc.StatusCode.UNAVAILABLE, "TRANSPORT_DOWN"),
        ({"transport": "falling"}, grpc.StatusCode.UNAVAILABLE, "TRANSPORT_DOWN"),
        ({"key": "0" * 64}, grpc.StatusCode.NOT_FOUND, "NOT_IN_POOL"),
        ({"key": "no key at all"}, grpc.StatusCode.NOT_FOUND, "NOT_IN_POOL"),
    ],
    ids=str,
)
async def test_a_refused_acquire_says_why_and_takes_no_lease(
    rig: Rig, changes: dict[str, object], code: grpc.StatusCode, reason: str
) -> None:
    ticket = await rig.ticket(b"photo")
    assert await call_error(rig.stub.Acquire(acquire(ticket, **changes))) == (code, reason)
    assert rig.pool.num_leases == 1
    assert await rig.fetch(ticket) == bytes_of(b"photo")


@pytest.mark.parametrize(
    ("field", "reason"),
    [("transport", "UNKNOWN_TRANSPORT"), ("epoch", "EPOCH_MISMATCH"), ("key", "NOT_IN_POOL")],
)
async def test_a_refusal_stays_short_whatever_was_sent(rig: Rig, field: str, reason: str) -> None:
    """Its sentence travels in a header, and those have a limit."""
    ticket = await rig.ticket(b"photo")
    _, found = await call_error(rig.stub.Acquire(acquire(ticket, **{field: "x" * 100_000})))
    assert found == reason


async def test_a_long_fingerprint_is_refused_shortly(rig: Rig) -> None:
    call = rig.stub.Encode(pb.EncodeRequest(items=[image(b"photo")], fingerprint="x" * 100_000))
    assert await call_error(call) == (grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH")


@pytest.mark.parametrize("lease_id", ["", "no lease", "x" * 100_000], ids=["empty", "unknown", "long"])
async def test_what_is_no_lease_fetches_nothing_and_ends_nothing(rig: Rig, lease_id: str) -> None:
    call = rig.stub.Fetch(pb.FetchRequest(lease_id=lease_id))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert error_of(ProducerError.from_call(caught.value)) == (grpc.StatusCode.NOT_FOUND, "LEASE_ENDED")
    assert not (await rig.stub.Release(pb.ReleaseRequest(lease_id=lease_id))).released


async def test_acquiring_ends_no_lease_on_another_embedding(rig: Rig) -> None:
    one, other = await rig.encode(b"one", b"other")
    await rig.stub.Acquire(acquire(one, lease_id=other.lease_id))
    assert (await rig.stub.Release(pb.ReleaseRequest(lease_id=other.lease_id))).released


async def test_an_evicted_embedding_is_not_found() -> None:
    async with Rig(pool_bytes=1 << 13) as rig:
        ticket = await rig.ticket(b"photo")
        await rig.stub.Release(pb.ReleaseRequest(lease_id=ticket.lease_id))
        await rig.encode(b"one", b"two")
        assert await call_error(rig.stub.Acquire(acquire(ticket))) == (grpc.StatusCode.NOT_FOUND, "NOT_IN_POOL")


async def test_an_ended_lease_fetches_nothing(rig: Rig) -> None:
    ticket = await rig.ticket(b"photo")
    await rig.stub.Release(pb.ReleaseRequest(lease_id=ticket.lease_id))
    call = rig.stub.Fetch(pb.FetchRequest(lease_id=ticket.lease_id))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert error_of(ProducerError.from_call(caught.value)) == (grpc.StatusCode.NOT_FOUND, "LEASE_ENDED")


LARGE = bytes(range(256)) * 250
"""Its block has 16 MiB: more than what travels ahead of a reader."""


async def test_a_block_being_fetched_outlives_its_lease() -> None:
    async with Rig(pool_bytes=24 << 20) as rig:
        lease = await rig.stub.Acquire(acquire(await rig.ticket(LARGE)))
        call = rig.stub.Fetch(pb.FetchRequest(lease_id=lease.lease_id))
        block = (await call.read()).data
        await rig.stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id))
        (refused,) = await rig.encode(LARGE[1:])
        assert error_of(refused) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "POOL_FULL")
        while part := await call.read():
            block += part.data
        assert block[128:-64] == bytes_of(LARGE)
        assert struct.unpack_from("<Q", block, len(block) - 64) == (lease.descriptor.generation,)
        await rig.ticket(LARGE[1:])


async def test_a_fetch_that_is_given_up_unpins() -> None:
    async with Rig(pool_bytes=24 << 20) as rig:
        lease = await rig.stub.Acquire(acquire(await rig.ticket(LARGE)))
        call = rig.stub.Fetch(pb.FetchRequest(lease_id=lease.lease_id))
        await call.read()
        await rig.stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id))
        assert rig.pool.store.num_pinned == 1
        call.cancel()
        await eventually(lambda: rig.pool.store.num_pinned == 0)


async def test_a_reader_that_does_not_read_on_loses_its_pin() -> None:
    async with Rig(pool_bytes=64 << 20, lease_s=0.5) as rig:
        ticket = await rig.ticket(bytes(60_000))  # larger than what waits in sockets and messages
        call = rig.stub.Fetch(pb.FetchRequest(lease_id=ticket.lease_id))
        assert (await call.read()).data
        await rig.stub.Release(pb.ReleaseRequest(lease_id=ticket.lease_id))
        assert rig.pool.store.num_pinned == 1
        await eventually(lambda: rig.pool.store.num_pinned == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 - some reads are still answered
            while await call.read() is not grpc.aio.EOF:
                pass
        error = ProducerError.from_call(caught.value)
        assert error_of(error) == (grpc.StatusCode.DEADLINE_EXCEEDED, "FETCH_TOO_SLOW")


# Overload


async def test_a_full_queue_is_the_items_error_and_says_when_to_come_back() -> None:
    async with Rig(max_queue_items=1) as rig:
        first = await rig.begin_step(b"first")
        second = rig.begin(b"first", b"second")
        await eventually(lambda: rig.sample("items_total", code="RESOURCE_EXHAUSTED") == 1)
        rig.device.gate.set()
        outcomes = (await second).outcomes
        assert outcomes[0].ticket.key == (await first).outcomes[0].ticket.key
        assert outcomes[1].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert details_of(outcomes[1].error) == ({"item_index": "1"}, True)


async def test_an_item_that_the_queue_cannot_do_in_time_is_refused_at_once(rig: Rig) -> None:
    """A step takes 0.2 s here; behind two others, 0.1 s is not enough."""
    for number in range(8):
        call = await rig.begin_step(b"before %d" % number)
        await asyncio.sleep(0.2)
        rig.device.gate.set()
        await call
    first, second = await rig.begin_step(b"first"), rig.begin(b"second")
    await eventually(lambda: rig.sample("queue_items") == 2)
    response = await rig.begin(b"hopeless", timeout_s=0.3)
    assert error_of(*outcomes(response)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_UNMEETABLE")
    assert rig.sample("queue_items") == 2
    rig.device.gate.set()
    await asyncio.gather(first, second)
    assert [b"hopeless"] not in rig.device.steps


async def test_media_that_wait_are_bounded_in_bytes() -> None:
    async with Rig(max_queue_bytes=20_000, pool_bytes=1 << 23) as rig:
        first = await rig.begin_step(b"first")
        refused = outcomes(await rig.begin(b"x" * 13_000, b"y" * 13_000))
        assert [error_of(one) for one in refused] == [(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")] * 2
        rig.device.gate.set()
        await first
        await eventually(lambda: rig.sample("queue_bytes") == 0)
        assert await rig.ticket(b"x" * 13_000)


async def test_a_request_of_too_many_bytes_is_refused_with_the_field_at_fault(rig: Rig) -> None:
    call = rig.begin(*[bytes([number]) * MAX_ITEM_BYTES for number in range(5)])
    with pytest.raises(grpc.aio.AioRpcError, match="at most 262144 are allowed") as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])
    violation = error_details_pb2.BadRequest()
    assert any(one.Unpack(violation) for one in status.details)
    assert violation.field_violations[0].field == "items"


async def test_a_pool_full_of_leases_is_the_items_error_until_they_end() -> None:
    async with Rig(pool_bytes=1 << 13) as rig:
        tickets = [await rig.ticket(data) for data in (b"one", b"two")]
        (refused,) = await rig.encode(b"three")
        assert error_of(refused) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "POOL_FULL")
        rig.now_s += LEASE_END_S
        third = await rig.ticket(b"three")
        assert await rig.fetch(third) == bytes_of(b"three")
        assert not (await rig.stub.Release(pb.ReleaseRequest(lease_id=tickets[0].lease_id))).released


async def test_the_last_lease_can_be_replaced() -> None:
    async with Rig(max_leases=1) as rig:
        ticket = await rig.ticket(b"photo")
        assert await rig.fetch(ticket) == bytes_of(b"photo")


async def test_an_embedding_larger_than_the_pool_is_no_overload() -> None:
    async with Rig(pool_bytes=1 << 13) as rig:
        (refused,) = await rig.encode(bytes(range(64)))
        code, _ = error_of(refused)
        assert code is not grpc.StatusCode.RESOURCE_EXHAUSTED


# What is given up


async def test_a_cancelled_request_never_reaches_the_device(rig: Rig) -> None:
    first = await rig.begin_step(b"first")
    second = rig.begin(b"second", b"third")
    await eventually(lambda: rig.sample("queue_items") == 3)
    second.cancel()
    await eventually(lambda: rig.sample("queue_items") == 1)
    rig.device.gate.set()
    await first
    await rig.ticket(b"fourth")
    assert rig.device.steps == [[b"first"], [b"fourth"]]
    assert rig.sample("items_total", code="CANCELLED") == 2
    assert rig.sample("items_total", code="OK") == 2


async def test_a_request_past_its_deadline_never_reaches_the_device(rig: Rig) -> None:
    first = await rig.begin_step(b"first")
    late = rig.begin(b"second", timeout_s=2.0)
    try:  # the item's end and the call's come at the same time
        (outcome,) = outcomes(await late)
    except grpc.aio.AioRpcError as error:
        outcome = ProducerError.from_call(error)
    assert isinstance(outcome, ProducerError)
    assert outcome.code is grpc.StatusCode.DEADLINE_EXCEEDED
    ended = ("CANCELLED", "DEADLINE_EXCEEDED")
    await eventually(lambda: sum(rig.sample("items_total", code=code) for code in ended) == 1)
    rig.device.gate.set()
    await first
    await rig.ticket(b"third")
    assert rig.device.steps == [[b"first"], [b"third"]]


async def test_a_cancelled_client_does_not_take_anothers_encode_along(rig: Rig) -> None:
    blocking = await rig.begin_step(b"first")
    one, other = rig.begin(b"photo"), rig.begin(b"photo")
    await eventually(lambda: rig.sample("items_shared_total", source="in_flight") == 1)
    one.cancel()
    await eventually(lambda: rig.sample("items_total", code="CANCELLED") == 1)
    rig.device.gate.set()
    assert (await other).outcomes[0].ticket.num_rows == 5
    await blocking


async def test_a_cancelled_request_leaves_no_lease_behind(rig: Rig) -> None:
    await rig.fetch(await rig.ticket(b"known"))
    first = await rig.begin_step(b"first")
    second = rig.begin(b"known", b"second")
    await eventually(lambda: rig.sample("queue_items") == 2)
    assert rig.pool.num_leases == 1
    second.cancel()
    await eventually(lambda: rig.sample("queue_items") == 1)
    num_leases = rig.pool.num_leases
    rig.device.gate.set()
    await first
    assert num_leases == 0


async def test_every_item_ends_in_one_outcome() -> None:
    """Thirty calls at once on a queue and a pool of four, some given up on the way."""
    names = [b"bad", *(b"item %d" % number for number in range(12))]
    random = Random(7)
    async with Rig(pool_bytes=4 << 12, max_queue_items=4) as rig:
        calls = [rig.begin(*random.choices(names, k=5)) for _ in range(30)]
        await eventually(lambda: rig.device.steps)
        for call in calls[::5]:
            call.cancel()
        responses = await asyncio.gather(*calls, return_exceptions=True)
        answered = [response for response in responses if isinstance(response, pb.EncodeResponse)]
        assert len(answered) >= 24
        assert all(len(response.outcomes) == 5 for response in answered)
        assert all(outcome.WhichOneof("outcome") for response in answered for outcome in response.outcomes)
        await eventually(lambda: rig.sample("queue_items") == 0)
        rig.now_s += LEASE_END_S
        assert await rig.fetch(await rig.ticket(b"afterwards")) == bytes_of(b"afterwards")
        assert (rig.pool.num_leases, rig.pool.store.num_pinned) == (0, 0)


# The end


async def test_draining_finishes_what_is_in_hand_and_refuses_the_rest(rig: Rig) -> None:
    first = await rig.begin_step(b"first")
    draining = asyncio.create_task(rig.admission.drain())
    await asyncio.sleep(0)
    (refused,) = await rig.encode(b"second")
    assert error_of(refused) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    rig.device.gate.set()
    await draining
    assert (await first).outcomes[0].ticket.num_rows == 5


async def test_a_stopped_loop_refuses_what_waits(rig: Rig) -> None:
    first = await rig.begin_step(b"first")
    second = rig.begin(b"second")
    await eventually(lambda: len(rig.loop._batcher) == 1)
    stopping = asyncio.create_task(asyncio.to_thread(rig.loop.stop))
    await eventually(lambda: rig.loop._stopping)
    rig.device.gate.set()
    await stopping
    assert (await first).outcomes[0].HasField("ticket")
    outcome = (await second).outcomes[0]
    assert outcome.error.code == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_what_is_served_can_be_asked(rig: Rig) -> None:
    assert await asyncio.to_thread(rig.client.info, 60) == rig.info
