"""EncodeStream between a real client and a real server, both in this process; the device is a small function."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from consumer_shim.client import ProducerError
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.integration.rig import MAX_ITEMS, WAIT_S, Rig, eventually, image


def request(number: int, data: bytes) -> pb.EncodeStreamRequest:
    return pb.EncodeStreamRequest(id=number, item=image(data))


async def test_each_item_has_its_outcome(rig: Rig) -> None:
    """Through the shim's client; twice as many as may be under way at once, one of them bad."""
    files = [b"%d" % number for number in range(2 * MAX_ITEMS)] + [b"bad"]

    def encode() -> dict[int, pb.Ticket | ProducerError]:
        return dict(rig.client.encode_stream(map(image, files), WAIT_S))

    outcomes = await asyncio.to_thread(encode)
    assert sorted(outcomes) == list(range(len(files)))
    bad = outcomes.pop(len(files) - 1)
    assert isinstance(bad, ProducerError)
    assert bad.reason == "MEDIA_UNREADABLE"
    for number, ticket in outcomes.items():
        assert isinstance(ticket, pb.Ticket)
        assert ticket.num_rows == len(files[number])


async def test_what_was_decoded_comes_as_files_do(rig: Rig) -> None:
    pixels = pb.MediaItem(modality=pb.MODALITY_IMAGE, decoded=pb.DecodedMedia(shape=[1, 2, 3], data=b"pixels"))
    wrong = pb.MediaItem(modality=pb.MODALITY_IMAGE, decoded=pb.DecodedMedia(shape=[2, 2, 3], data=b"pixels"))

    def encode() -> dict[int, pb.Ticket | ProducerError]:
        return dict(rig.client.encode_stream([pixels, wrong, image(b"pixels")], WAIT_S))

    outcomes = await asyncio.to_thread(encode)
    assert isinstance(outcomes[1], ProducerError)
    assert outcomes[1].reason == "MEDIA_UNREADABLE"
    tickets = [outcomes[number] for number in (0, 2)]
    assert len({ticket.key for ticket in tickets if isinstance(ticket, pb.Ticket)}) == 2
    assert sorted(item.decoded is None for item in rig.items) == [False, True]


async def test_what_is_done_is_answered_before_what_is_not(rig: Rig) -> None:
    known = await rig.ticket(b"known")
    first = await rig.begin_step(b"first")
    call = rig.stub.EncodeStream(timeout=WAIT_S)
    await call.write(request(7, b"slow"))
    await call.write(request(8, b"known"))
    answer = await call.read()
    assert (answer.id, answer.outcome.ticket.key) == (8, known.key)
    rig.device.gate.set()
    assert (await call.read()).id == 7
    await call.done_writing()
    await first


async def test_no_more_are_under_way_than_are_allowed(rig: Rig) -> None:
    first = await rig.begin_step(b"first")

    def many() -> Iterator[pb.EncodeStreamRequest]:
        return (request(number, b"item %d" % number) for number in range(3 * MAX_ITEMS))

    call = rig.stub.EncodeStream(many(), timeout=WAIT_S)
    await eventually(lambda: rig.sample("queue_items") == 1 + MAX_ITEMS)
    await asyncio.sleep(0.1)
    assert rig.sample("queue_items") == 1 + MAX_ITEMS
    rig.device.gate.set()
    assert len([answer async for answer in call]) == 3 * MAX_ITEMS
    await first


async def test_a_stream_that_is_cancelled_leaves_nothing_behind(rig: Rig) -> None:
    first = await rig.begin_step(b"first")
    call = rig.stub.EncodeStream(timeout=WAIT_S)
    await call.write(request(1, b"one"))
    await call.write(request(2, b"two"))
    await eventually(lambda: rig.sample("queue_items") == 3)
    call.cancel()
    await eventually(lambda: rig.sample("queue_items") == 1)
    rig.device.gate.set()
    await first
    assert rig.device.steps == [[b"first"]]
    assert rig.pool.num_leases == 1


async def test_an_empty_stream_ends(rig: Rig) -> None:
    assert [answer async for answer in rig.stub.EncodeStream(iter(()), timeout=WAIT_S)] == []


async def test_one_stream_too_many_is_refused_until_another_ends() -> None:
    async with Rig(max_streams=1) as rig:
        first = rig.stub.EncodeStream(timeout=WAIT_S)
        await first.write(request(1, b"one"))
        assert (await first.read()).id == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.EncodeStream(timeout=WAIT_S).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        answers = [answer async for answer in rig.stub.EncodeStream(iter([request(2, b"two")]), timeout=WAIT_S)]
        assert [answer.outcome.ticket.num_rows for answer in answers] == [3]


async def test_a_stream_on_which_nothing_comes_is_ended() -> None:
    """What is under way is answered first."""
    async with Rig(stream_idle_s=0.3) as rig:
        call = rig.stub.EncodeStream(timeout=WAIT_S)
        rig.device.gate.clear()
        await call.write(request(1, b"one"))
        await eventually(lambda: rig.device.steps)
        await asyncio.sleep(0.5)
        rig.device.gate.set()
        assert (await call.read()).outcome.ticket.num_rows == 3
        with pytest.raises(grpc.aio.AioRpcError, match="nothing came for") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
