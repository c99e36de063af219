"""What the clients send, and what they take for an answer."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import ours, peer
from bench.images import picture
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb import encoder_cache_pb2_grpc as pb_grpc

IMAGE = picture(1, 1, 32)
TICKET = pb.ItemOutcome(ticket=pb.Ticket(lease_id="ab" * 16))


class Producer(pb_grpc.EncoderCacheServicer):
    """Answers as it is told to, and remembers what it was sent; encodes nothing."""

    def __init__(self) -> None:
        self.outcome = TICKET
        self.images: list[bytes] = []
        self.released: list[str] = []

    async def Encode(self, request, context):  # type: ignore[no-untyped-def]
        self.images += [item.data for item in request.items if item.modality == pb.MODALITY_IMAGE]
        return pb.EncodeResponse(outcomes=[self.outcome])

    async def EncodeStream(self, request_iterator, context):  # type: ignore[no-untyped-def]
        """Answers in pairs, the later first; breaks off at what says so."""
        held = []
        async for request in request_iterator:
            if request.item.data == b"break":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
            if request.item.data == b"end":
                return
            self.images.append(request.item.data)
            held.append(pb.EncodeStreamResponse(id=request.id, outcome=self.outcome))
            if len(held) == 2:
                while held:
                    yield held.pop()

    async def Release(self, request, context):  # type: ignore[no-untyped-def]
        self.released += [request.lease_id, *request.lease_ids]
        return pb.ReleaseResponse(released=True)


@pytest.fixture
async def producer() -> AsyncIterator[tuple[Producer, str]]:
    servicer, server = Producer(), grpc.aio.server()
    pb_grpc.add_EncoderCacheServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_picture_is_sent_and_its_lease_given_back_when_asked(producer: tuple[Producer, str]) -> None:
    servicer, address = producer
    async with ours.client(address) as send:
        settle = await send(ours.request(IMAGE))
        assert (servicer.images, servicer.released) == ([IMAGE], [])
        assert settle is not None
        await settle()
    assert servicer.released == ["ab" * 16]


async def test_a_refused_picture_is_no_answer(producer: tuple[Producer, str]) -> None:
    servicer, address = producer
    servicer.outcome = pb.ItemOutcome()
    servicer.outcome.error.message = "the queue is full"
    async with ours.client(address) as send:
        with pytest.raises(ValueError, match="the queue is full"):
            await send(ours.request(IMAGE))


async def test_pictures_over_one_stream_each_have_their_answer(producer: tuple[Producer, str]) -> None:
    servicer, address = producer
    async with ours.stream_client(address) as send:
        settles = await asyncio.gather(*(send(ours.stream_request(image)) for image in (IMAGE, b"other")))
        assert (servicer.images, servicer.released) == ([IMAGE, b"other"], [])
        await asyncio.gather(*(settle() for settle in settles if settle is not None))
    assert servicer.released == ["ab" * 16] * 2


@pytest.mark.parametrize(("image", "sentence"), [(b"break", "going away"), (b"end", "the producer ended the stream")])
async def test_a_stream_that_ends_is_no_answer(producer: tuple[Producer, str], image: bytes, sentence: str) -> None:
    _, address = producer
    async with ours.stream_client(address) as send:
        first = asyncio.create_task(send(ours.stream_request(IMAGE)))
        await asyncio.sleep(0)
        with pytest.raises((ValueError, grpc.RpcError), match=sentence):
            await send(ours.stream_request(image))
        with pytest.raises((ValueError, grpc.RpcError), match=sentence):
            await first


async def test_a_picture_refused_in_a_stream_is_no_answer(producer: tuple[Producer, str]) -> None:
    servicer, address = producer
    servicer.outcome = pb.ItemOutcome()
    servicer.outcome.error.message = "the queue is full"
    async with ours.stream_client(address) as send:
        found = await asyncio.gather(*(send(ours.stream_request(IMAGE)) for _ in range(2)), return_exceptions=True)
    assert [isinstance(one, ValueError) and "the queue is full" in str(one) for one in found] == [True, True]


async def test_a_trivial_call_releases_what_never_was(producer: tuple[Producer, str]) -> None:
    servicer, address = producer
    async with ours.trivial_client(address) as send:
        assert await send(ours.trivial_request()) is None
    assert servicer.released == ["0" * 32]


def test_settings_are_flags() -> None:
    flags = [ours._flag(*one) for one in {"pool_bytes": 5, "eager": True, "media_io_kwargs": {"image": {}}}.items()]
    assert flags == [["--pool-bytes", "5"], ["--eager"], ["--media-io-kwargs", '{"image": {}}']]


@pytest.mark.parametrize("status", [200, 500])
async def test_a_chat_request_carries_the_picture_and_any_other_status_is_no_answer(status: int) -> None:
    bodies = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=status, text="no room")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app, host="127.0.0.1") as server, peer.client(str(server.make_url("")).rstrip("/")) as send:
        if status == 200:
            assert await send(peer.request(IMAGE)) is None
        else:
            with pytest.raises(ValueError, match="vLLM answers 500: no room"):
                await send(peer.request(IMAGE))
    (body,) = bodies
    (url,) = [part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url"]
    assert base64.b64decode(url.removeprefix("data:image/jpeg;base64,")) == IMAGE
    assert body["max_tokens"] == 1
    assert json.loads(peer.request(IMAGE)) == body
