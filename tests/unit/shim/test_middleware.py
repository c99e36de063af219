"""The middleware between an ASGI server and vLLM's app, with a real gRPC producer on loopback."""

import asyncio
import base64
import contextlib
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from prometheus_client import REGISTRY

import consumer_shim.fetch  # noqa: F401 – here, since it imports vLLM for long, which is no part of any test
from consumer_shim import budget, endpoints, retries
from consumer_shim.balancer import Health, item_digest, rank
from consumer_shim.budget import RetryBudget
from consumer_shim.middleware import EncodeMiddleware
from consumer_shim.pull import Failure
from consumer_shim.side_channel import SideChannel
from consumer_shim.tickets import PullTicket, from_params
from producer.server import Servicer
from producer.wire.contract import ERROR_DOMAIN, Reason
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheServicer, add_EncoderCacheServicer_to_server
from tests.kit.ports import free_port
from tests.kit.samples import total
from tests.unit.shim.conftest import FileServer, eventually

BOUND_S = 20.0
PATH = "/v1/chat/completions"
TOKENIZE = "/tokenize"
SETTINGS = {"mm_processor_kwargs": {"max_pixels": 1000}, "media_io_kwargs": {"video": {"num_frames": 4}}}
GONE = Failure(503, "the embedding has gone")
LEASE = f"{0:032x}"
Message = MutableMapping[str, Any]


class Encoder(EncoderCacheServicer):
    """Gives a ticket for each item, or what a test says. It encodes nothing, and grants no leases."""

    address: str

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.settings: list[dict[str, str]] = []
        self.released: list[str] = []
        self.errors: dict[bytes, grpc.StatusCode] = {}
        """The error of an item, by its file."""
        self.answer: Callable[[Any], Awaitable[pb.EncodeResponse]] | None = None
        self.ticket_offset = 0
        """The number of its first ticket."""
        self._places: dict[bytes, int] = {}

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        self.items += [item.data for item in request.items]
        self.settings.append(dict(request.settings))
        if self.answer is not None:
            return await self.answer(context)
        return pb.EncodeResponse(outcomes=map(self._outcome, request.items))

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self.released += [request.lease_id, *request.lease_ids]
        return pb.ReleaseResponse(released=True)

    def refuse(self, code: grpc.StatusCode, message: str = "not now") -> None:
        """Has each call fail as a whole."""

        async def abort(context: Any) -> pb.EncodeResponse:
            details = (("grpc-status-details-bin", error_status(code, message).SerializeToString()),)
            await context.abort(code, message, details)
            raise AssertionError

        self.answer = abort

    def _outcome(self, item: pb.MediaItem) -> pb.ItemOutcome:
        """Tickets are numbered in the order in which their files first came."""
        place = self._places.setdefault(item.data, len(self._places))
        if item.data in self.errors:
            return pb.ItemOutcome(error=error_status(self.errors[item.data], "no image"))
        return pb.ItemOutcome(ticket=ticket(self.ticket_offset + place))


def error_status(code: grpc.StatusCode, message: str) -> status_pb2.Status:
    """As a producer tells an error; overload has a reason of its own."""
    found = status_pb2.Status(code=code.value[0], message=message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        found.details.add().Pack(error_details_pb2.ErrorInfo(reason=Reason.QUEUE_FULL.value, domain=ERROR_DOMAIN))
    return found


def ticket(place: int, **changes: Any) -> pb.Ticket:
    fields = {"modality": pb.MODALITY_IMAGE, "num_rows": 4, "width": 8, "dtype": "float32", "epoch": "0" * 16}
    fields |= {"key": f"{place:064x}", "lease_id": f"{place:032x}", "content_part": json.dumps(stand_in(place))}
    return pb.Ticket(**(fields | changes))


def stand_in(place: int) -> dict[str, Any]:
    """The content part of a ticket."""
    return {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 10]}, "uuid": f"{place:064x}"}


@contextlib.asynccontextmanager
async def serving(encoder: Encoder) -> AsyncIterator[Encoder]:
    server = grpc.aio.server()
    add_EncoderCacheServicer_to_server(encoder, server)
    encoder.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield encoder
    await server.stop(grace=None)


@pytest.fixture
async def encoder() -> AsyncIterator[Encoder]:
    async with serving(Encoder()) as encoder:
        yield encoder


@pytest.fixture
async def second() -> AsyncIterator[Encoder]:
    """Another one, for a middleware with two."""
    async with serving(Encoder()) as encoder:
        yield encoder


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent again is sent again soon."""
    monkeypatch.setattr(retries, "_FIRST_DELAY_S", 0.001)


@dataclass
class App:
    """A small ASGI app: remembers its request, and answers with `messages`, one by one."""

    messages: Sequence[Message] = ()
    then: Sequence[Message] | None = None
    """What it answers from its second request on, where that is something else."""
    scope: MutableMapping[str, Any] = field(default_factory=dict)
    body: bytes = b""
    received: list[str] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """How many messages had reached the client after each one that was sent."""
    client: "Client | None" = None
    has_body: asyncio.Event = field(default_factory=asyncio.Event)
    """The whole body of its request has come."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        self.body = b""
        self.has_body.clear()
        more = True
        while more:
            message = await receive()
            self.body += message.get("body", b"")
            more = message.get("more_body", False)
        self.has_body.set()
        self.received.append((await receive())["type"])
        messages = self.messages or response(200, b"{}")
        self.messages = messages if self.then is None else self.then
        for one in messages:
            await send(one)
            if self.client is not None:
                self.sent.append(len(self.client.messages))

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.scope["headers"])


def response(status: int, *bodies: bytes) -> list[Message]:
    """A whole response of one message for each of `bodies`."""
    start = {"type": "http.response.start", "status": status, "headers": [(b"x-app", b"yes")]}
    last = len(bodies) - 1
    parts = [
        {"type": "http.response.body", "body": body, "more_body": place < last} for place, body in enumerate(bodies)
    ]
    return [start, *parts]


@dataclass
class Client:
    """What came back."""

    messages: list[Message] = field(default_factory=list)

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def error(self) -> str:
        """The sentence of an error in the form of OpenAI's API, whose length and end are as announced."""
        assert int(self.headers[b"content-length"]) == len(self.body)
        assert not self.messages[-1]["more_body"]
        error = json.loads(self.body)["error"]
        assert error["code"] == self.status
        assert set(error) == {"message", "type", "param", "code"}
        return str(error["message"])


class Stack:
    """The middleware around an app, as vLLM's server calls it."""

    def __init__(self, addresses: list[str], app: App | None = None, **settings: Any) -> None:
        self.app = app or App()
        self.engine_id = f"engine-{uuid.uuid4()}"
        transfer = SimpleNamespace(
            engine_id=self.engine_id,
            ec_connector_extra_config={"producers": addresses, "encode_timeout_s": BOUND_S, **settings},
        )
        self.model_config = SimpleNamespace(
            allowed_local_media_path="",
            allowed_media_domains=None,
            multimodal_config=SimpleNamespace(mm_processor_kwargs=None, media_io_kwargs={}),
        )
        self.vllm_config = SimpleNamespace(ec_transfer_config=transfer, model_config=self.model_config)
        self.middleware = EncodeMiddleware(self.app)

    def scope(self, **changes: Any) -> dict[str, Any]:
        state = SimpleNamespace(vllm_config=self.vllm_config)
        headers = [(b"Content-Type", b"application/json"), (b"authorization", b"Bearer x")]
        fields = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
        return fields | {"app": SimpleNamespace(state=state)} | changes

    async def post(self, *chunks: bytes, **changes: Any) -> Client:
        """A request with its body in `chunks`; the client leaves once the app has what became of them."""
        client = self.app.client = Client()
        pieces: list[Message] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        pieces[-1]["more_body"] = False
        arriving = iter(pieces)

        async def receive() -> Message:
            piece = next(arriving, None)
            if piece is None:
                await self.app.has_body.wait()
            return piece or {"type": "http.disconnect"}

        await asyncio.wait_for(self.middleware(self.scope(**changes), receive, client.send), BOUND_S)
        return client


def image(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*files: bytes, **more: Any) -> bytes:
    content = [{"type": "text", "text": "what is it?"}, *map(image, files)]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **more}).encode()


@pytest.fixture
def stack(encoder: Encoder) -> Stack:
    return Stack([encoder.address])


# What is rewritten


async def test_media_become_tickets(stack: Stack, encoder: Encoder) -> None:
    client = await stack.post(chat(b"one", b"two", ec_transfer_params={"mine": 1}))
    assert client.status == 200
    assert encoder.items == [b"one", b"two"]
    content = stack.app.json["messages"][0]["content"]
    assert content[0] == {"type": "text", "text": "what is it?"}
    assert content[1:] == [stand_in(0), stand_in(1)]
    params = stack.app.json["ec_transfer_params"]
    assert params["mine"] == 1
    pulls = from_params(params)
    assert [pull.lease_id for pull in pulls] == [f"{0:032x}", f"{1:032x}"]
    assert {pull.address for pull in pulls} == {encoder.address}
    assert encoder.released == []


async def test_the_length_is_that_of_the_new_body(stack: Stack) -> None:
    body = chat(b"one" * 1000)
    old = [(b"Content-Length", str(len(body)).encode()), (b"Transfer-Encoding", b"chunked"), (b"x-mine", b"kept")]
    await stack.post(body, headers=old)
    expected = {b"x-mine": b"kept", b"content-length": str(len(stack.app.body)).encode()}
    assert stack.app.headers == {**expected, b"x-request-id": stack.app.headers[b"x-request-id"]}
    assert stack.app.scope["path"] == PATH


async def test_a_body_in_pieces(stack: Stack, encoder: Encoder) -> None:
    body = chat(b"one")
    await stack.post(body[:10], b"", body[10:])
    assert encoder.items == [b"one"]
    assert stack.app.json["messages"][0]["content"][1]["type"] == "image_embeds"


@pytest.mark.parametrize("path", ["/prefix/v1/chat/completions", "/v1/chat/completions"])
async def test_it_may_be_mounted_anywhere(stack: Stack, encoder: Encoder, path: str) -> None:
    await stack.post(chat(b"one"), path=path)
    assert encoder.items == [b"one"]


async def test_a_disconnect_after_the_body_still_arrives(stack: Stack) -> None:
    await stack.post(chat(b"one"))
    assert stack.app.received == ["http.disconnect"]


async def test_a_client_that_leaves_early_costs_nothing(stack: Stack, encoder: Encoder) -> None:
    messages = iter([{"type": "http.request", "body": chat(b"one"), "more_body": True}, {"type": "http.disconnect"}])
    client = Client()

    async def receive() -> Message:
        return next(messages, {"type": "http.disconnect"})

    await stack.middleware(stack.scope(), receive, client.send)
    assert stack.app.received == ["http.disconnect"]
    assert encoder.items == []
    assert stack.app.body == b""


class Leaving:
    """A client that sends one body, then what a test says, and an app that takes what it gets."""

    def __init__(self, encoder: Encoder, body: bytes) -> None:
        self.stack = Stack([encoder.address])
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.got: list[Message] = []
        self.begun, self.ended, self.let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.num_takes = 2
        self.num_asked = self.num_waiting = 0
        """How often the client's next message was asked for, and by how many it is waited for."""
        self.is_cancelled = False
        encoder.answer = self._encode

    async def run(self) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            for _ in range(self.num_takes):
                self.got.append(await receive())

        middleware = EncodeMiddleware(app)
        await asyncio.wait_for(middleware(self.stack.scope(), self._receive, Client().send), BOUND_S)

    async def _receive(self) -> Message:
        self.num_asked += 1
        self.num_waiting += 1
        try:
            return await self.messages.get()
        finally:
            self.num_waiting -= 1

    async def _encode(self, context: Any) -> pb.EncodeResponse:
        self.begun.set()
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        finally:
            self.ended.set()
        return pb.EncodeResponse(outcomes=[pb.ItemOutcome(ticket=ticket(0))])


async def test_a_client_that_leaves_while_its_media_are_encoded_ends_that(encoder: Encoder) -> None:
    """At the producer, too."""
    leaving = Leaving(encoder, chat(b"one"))
    leaving.num_takes = 1
    exchange = asyncio.create_task(leaving.run())
    await asyncio.wait_for(leaving.begun.wait(), BOUND_S)
    leaving.messages.put_nowait({"type": "http.disconnect"})
    await exchange
    assert leaving.got == [{"type": "http.disconnect"}]
    await asyncio.wait_for(leaving.ended.wait(), BOUND_S)
    assert leaving.is_cancelled


async def test_what_else_comes_meanwhile_is_kept(encoder: Encoder) -> None:
    leaving = Leaving(encoder, chat(b"one"))
    leaving.num_takes = 3
    other: Message = {"type": "http.request", "body": b"more", "more_body": False}
    exchange = asyncio.create_task(leaving.run())
    await asyncio.wait_for(leaving.begun.wait(), BOUND_S)
    leaving.messages.put_nowait(other)
    await eventually(lambda: leaving.messages.empty())
    leaving.let_go.set()
    leaving.messages.put_nowait({"type": "http.disconnect"})
    await exchange
    assert [message["type"] for message in leaving.got] == ["http.request", "http.request", "http.disconnect"]
    assert b"image_embeds" in leaving.got[0]["body"]
    assert leaving.got[1] == other


async def test_who_leaves_when_all_is_encoded_is_told_to_the_app(encoder: Encoder) -> None:
    leaving = Leaving(encoder, chat(b"one"))
    exchange = asyncio.create_task(leaving.run())
    await asyncio.wait_for(leaving.begun.wait(), BOUND_S)
    leaving.let_go.set()
    await eventually(lambda: leaving.got)
    leaving.messages.put_nowait({"type": "http.disconnect"})
    await exchange
    assert [message["type"] for message in leaving.got] == ["http.request", "http.disconnect"]
    assert not leaving.is_cancelled


async def test_an_exchange_leaves_nobody_waiting(encoder: Encoder) -> None:
    """For a message that the app never asked for."""
    leaving = Leaving(encoder, chat(b"one"))
    leaving.num_takes = 1
    leaving.let_go.set()
    await leaving.run()
    assert leaving.got[0]["type"] == "http.request"
    assert (leaving.num_asked, leaving.num_waiting) == (2, 0)


async def test_an_app_that_gives_up_ends_the_encode(encoder: Encoder) -> None:
    leaving = Leaving(encoder, chat(b"one"))
    exchange = asyncio.create_task(leaving.run())
    await asyncio.wait_for(leaving.begun.wait(), BOUND_S)
    exchange.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange
    await asyncio.wait_for(leaving.ended.wait(), BOUND_S)
    assert leaving.is_cancelled


async def test_who_is_turned_away_costs_nothing(stack: Stack, encoder: Encoder) -> None:
    """vLLM's own checks of who is asking run inside, and look at no body."""

    async def turn_away(scope: Any, receive: Any, send: Any) -> None:
        for message in response(401, b"no"):
            await send(message)

    client = Client()
    await EncodeMiddleware(turn_away)(stack.scope(), no_body, client.send)
    assert client.messages == response(401, b"no")
    assert encoder.items == []


async def no_body() -> Message:
    raise AssertionError("nobody should read it")


async def test_a_refusal_wins_over_what_the_app_makes_of_it(stack: Stack, encoder: Encoder) -> None:
    """FastAPI takes any error while it reads a body for a bad body."""

    async def bad_body(scope: Any, receive: Any, send: Any) -> None:
        try:
            await receive()
        except Exception:
            for message in response(400, b"There was an error parsing the body"):
                await send(message)

    encoder.errors = {b"one": grpc.StatusCode.UNAVAILABLE}
    stack.middleware = EncodeMiddleware(bad_body)
    client = await stack.post(chat(b"one"))
    assert client.status == 503
    assert client.error == "image 1 of 1: no image"


# Two producers


@pytest.fixture
def pair(encoder: Encoder, second: Encoder) -> Stack:
    return Stack([encoder.address, second.address])


@dataclass
class At:
    """An address that items rank."""

    address: str
    health: Health = field(default_factory=Health)


def files_of(stack: Stack, encoder: Encoder) -> Iterator[bytes]:
    """Files that the server's images go to `encoder` with."""
    addresses = stack.vllm_config.ec_transfer_config.ec_connector_extra_config["producers"]
    for number in itertools.count():
        digest = item_digest(pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"%d" % number))
        if rank([At(address) for address in addresses], digest)[0].address == encoder.address:
            yield b"%d" % number


def addresses(stack: Stack) -> list[str]:
    """Whose tickets the app was given."""
    return [pull.address for pull in from_params(stack.app.json["ec_transfer_params"])]


async def test_each_item_goes_to_its_own_producer(pair: Stack, encoder: Encoder, second: Encoder) -> None:
    """Again and again, so that it finds its embedding."""
    one, two = next(files_of(pair, encoder)), next(files_of(pair, second))
    for _ in range(3):
        assert (await pair.post(chat(one, two))).status == 200
        assert addresses(pair) == [encoder.address, second.address]
    assert (encoder.items, second.items) == ([one] * 3, [two] * 3)


async def test_one_that_is_down_is_passed_over(encoder: Encoder) -> None:
    stack = Stack([f"127.0.0.1:{free_port()}", encoder.address])
    files = [b"%d" % number for number in range(8)]
    for file in files:
        assert (await stack.post(chat(file))).status == 200
        assert addresses(stack) == [encoder.address]
    assert encoder.items == files


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
@pytest.mark.parametrize("as_a_whole", [True, False])
async def test_what_one_does_not_take_goes_to_the_other(
    pair: Stack, encoder: Encoder, second: Encoder, code: grpc.StatusCode, as_a_whole: bool
) -> None:
    """At once; what it gave for other items stays."""
    files = files_of(pair, encoder)
    one, two = next(files), next(files)
    if as_a_whole:
        encoder.refuse(code)
    else:
        encoder.errors = {two: code}
    assert (await pair.post(chat(one, two))).status == 200
    assert encoder.items == [one, two]
    assert second.items == ([one, two] if as_a_whole else [two])
    assert addresses(pair) == [second.address if as_a_whole else encoder.address, second.address]
    assert encoder.released == []


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.FAILED_PRECONDITION],
)
@pytest.mark.parametrize("as_a_whole", [True, False])
async def test_what_would_fail_elsewhere_too_stays(
    pair: Stack, encoder: Encoder, second: Encoder, code: grpc.StatusCode, as_a_whole: bool
) -> None:
    one = next(files_of(pair, encoder))
    if as_a_whole:
        encoder.refuse(code)
    else:
        encoder.errors = {one: code}
    assert (await pair.post(chat(one))).status >= 400
    assert (encoder.items, second.items) == ([one], [])


async def test_where_none_takes_more_the_last_one_speaks(pair: Stack, encoder: Encoder, second: Encoder) -> None:
    encoder.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    second.refuse(grpc.StatusCode.UNAVAILABLE, "shutting down")
    client = await pair.post(chat(next(files_of(pair, encoder))))
    assert client.status == 503
    assert client.error == f"encoding at {second.address} failed: shutting down"
    client = await pair.post(chat(next(files_of(pair, second))))  # which is passed over now
    assert client.status == 429
    assert client.error == f"encoding at {encoder.address} failed: the queue is full"
    assert pair.app.body == b""


# The length of a prompt


@pytest.mark.parametrize("path", [TOKENIZE, "/prefix" + TOKENIZE])
async def test_tokenizing_needs_no_embedding(stack: Stack, encoder: Encoder, path: str) -> None:
    client = await stack.post(chat(b"one", b"two"), path=path)
    assert client.messages == response(200, b"{}")
    assert stack.app.json["messages"][0]["content"][1:] == [stand_in(0), stand_in(1)]
    assert encoder.items == [b"one", b"two"]
    assert sorted(encoder.released) == [f"{0:032x}", f"{1:032x}"]


async def test_leases_are_released_where_they_were_given(pair: Stack, encoder: Encoder, second: Encoder) -> None:
    one, two = next(files_of(pair, encoder)), next(files_of(pair, second))
    second.ticket_offset = 10
    assert (await pair.post(chat(one, two), path=TOKENIZE)).status == 200
    assert (encoder.released, second.released) == ([f"{0:032x}"], [f"{10:032x}"])


@pytest.mark.parametrize("body", [b'{"prompt": "text"}', b'{"prompt": [1, 2]}', chat(), b"no json"])
async def test_tokenizing_without_media(stack: Stack, encoder: Encoder, body: bytes) -> None:
    await stack.post(body, path=TOKENIZE)
    assert stack.app.body == body
    assert (encoder.items, encoder.released) == ([], [])


async def test_tokenizing_is_refused_as_chatting_is(stack: Stack, encoder: Encoder) -> None:
    encoder.errors = {b"two": grpc.StatusCode.INVALID_ARGUMENT}
    client = await stack.post(chat(b"one", b"two"), path=TOKENIZE)
    assert client.status == 400
    assert client.error == "image 2 of 2: no image"
    assert encoder.released == [f"{0:032x}"]


# Beam search


@contextlib.contextmanager
def engine_of(stack: Stack, failures: dict[str, Failure] | None = None) -> Iterator[list[PullTicket]]:
    """The engine of this server listens; the tickets that it was left."""
    left: list[PullTicket] = []
    channel = SideChannel(stack.engine_id, (failures or {}).get, lambda tickets, origin: left.extend(tickets))
    try:
        yield left
    finally:
        channel.close()


async def test_beam_search_leaves_its_tickets(stack: Stack) -> None:
    """The engine has them once the app has the body, which carries them, too."""
    with engine_of(stack) as left:
        seen: list[int] = []
        app = stack.app

        async def watch(scope: Any, receive: Any, send: Any) -> None:
            async def receive_and_look() -> Message:
                message: Message = await receive()
                seen.append(len(left))
                return message

            await app(scope, receive_and_look, send)

        stack.middleware = EncodeMiddleware(watch)
        assert (await stack.post(chat(b"one", b"two", use_beam_search=True))).status == 200
    assert seen[0] == 2
    assert left == from_params(app.json["ec_transfer_params"])
    assert [one.key for one in left] == [f"{0:064x}", f"{1:064x}"]
    assert app.json["use_beam_search"] is True


@pytest.mark.parametrize("more", [{}, {"use_beam_search": False}, {"use_beam_search": None}])
async def test_other_requests_leave_none(stack: Stack, more: dict[str, Any]) -> None:
    with engine_of(stack) as left:
        assert (await stack.post(chat(b"one", **more))).status == 200
    assert left == []


async def test_beam_search_without_media(stack: Stack, encoder: Encoder) -> None:
    """Nobody needs to listen for it, and any settings go."""
    stack.model_config.multimodal_config = SimpleNamespace(**SETTINGS)
    body = chat(use_beam_search=True)
    assert (await stack.post(body)).status == 200
    assert stack.app.body == body
    assert encoder.items == []


async def test_beam_search_where_vllm_changes_the_uuid(stack: Stack) -> None:
    """With `--media-io-kwargs`, items go by no ticket's key."""
    stack.model_config.multimodal_config = SimpleNamespace(**SETTINGS)
    with engine_of(stack) as left:
        client = await stack.post(chat(b"one", use_beam_search=True))
    assert client.status == 400
    assert client.error.startswith("use_beam_search is not served with media where --media-io-kwargs is set")
    assert (left, stack.app.body) == ([], b"")
    assert (await stack.post(chat(b"one"))).status == 200


async def test_beam_search_where_only_the_processor_has_settings(encoder: Encoder) -> None:
    stack = Stack([encoder.address])
    stack.model_config.multimodal_config.mm_processor_kwargs = SETTINGS["mm_processor_kwargs"]
    with engine_of(stack) as left:
        assert (await stack.post(chat(b"one", use_beam_search=True))).status == 200
    assert len(left) == 1


async def test_beam_search_whose_tickets_the_engine_does_not_take(stack: Stack) -> None:
    client = await stack.post(chat(b"one", use_beam_search=True))  # nobody listens
    assert client.status == 503
    assert client.error.startswith("use_beam_search: the engine did not take the tickets")
    assert client.headers[b"retry-after"] == b"1"
    assert stack.app.body == b""


async def test_beam_search_whose_embedding_was_lost(stack: Stack, encoder: Encoder) -> None:
    """Its requests of vLLM's own fail for the lease of a ticket that was left; the new one is left, too."""
    stack.app.messages, stack.app.then = response(500, b"{}"), response(200, b"{}")
    with engine_of(stack, {LEASE: GONE}) as left:
        client = await stack.post(chat(b"one", use_beam_search=True))
    assert client.messages == stack.app.then
    assert encoder.items == [b"one", b"one"]
    assert len(left) == 2


@pytest.mark.parametrize("settings", [SimpleNamespace(**SETTINGS), None])
async def test_refused_beam_search_holds_no_leases(stack: Stack, encoder: Encoder, settings: Any) -> None:
    """Either nothing is encoded for it, or it is given back."""
    stack.model_config.multimodal_config = settings or stack.model_config.multimodal_config
    assert (await stack.post(chat(b"one", use_beam_search=True))).status >= 400
    assert encoder.items == [] or encoder.released == [f"{0:032x}"]


async def test_beam_search_with_tickets_that_a_client_brings(stack: Stack) -> None:
    """As from a gateway before this server; vLLM's own requests have neither these nor others."""
    await stack.post(chat(b"one"))
    body = stack.app.json | {"use_beam_search": True}
    with engine_of(stack) as left:
        client = await stack.post(json.dumps(body).encode())
    assert client.status == 400 or left == from_params(body["ec_transfer_params"])


async def test_beam_search_with_many_media(stack: Stack) -> None:
    with engine_of(stack) as left:
        client = await stack.post(chat(*[b"one"] * 65, use_beam_search=True))
    assert client.status == 400 or len(left) == 65


async def test_tokenizing_leaves_nothing(stack: Stack) -> None:
    """It is no search, whatever else a client's body says."""
    with engine_of(stack) as left:
        assert (await stack.post(chat(b"one", use_beam_search=True), path=TOKENIZE)).status == 200
    assert left == []


# Other endpoints

IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE_BLOCK]}


def user(*content: Any) -> list[Any]:
    return [{"role": "user", "content": list(content)}]


ELSEWHERE = [
    ("/v1/responses", {"input": user({"type": "input_text", "text": "?"}, INPUT_IMAGE)}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "1", "output": [INPUT_IMAGE]}]}),
    ("/v1/responses/render", {"input": user(INPUT_IMAGE)}),
    ("/v1/messages", {"messages": user({"type": "text", "text": "?"}, IMAGE_BLOCK)}),
    ("/v1/messages", {"messages": user(TOOL_RESULT)}),
    ("/v1/messages/count_tokens", {"messages": user(TOOL_RESULT)}),
    ("/v1/messages/render", {"messages": user(IMAGE_BLOCK)}),
    ("/v1/chat/completions/batch", {"messages": [user(image(b"one")), user({"type": "text", "text": "?"})]}),
    *(
        (path, {"messages": user(image(b"one"))})
        for path in (
            *("/v1/chat/completions/render", "/v1/embeddings", "/pooling", "/classify"),
            *("/invocations", "/cohere/v2/chat", "/cohere/v2/chat/render"),
        )
    ),
    ("/v2/embed", {"inputs": [{"content": [image(b"one")]}]}),
    ("/v2/embed", {"images": ["data:image/png;base64,AAAA"]}),
    *(
        ("/score", {field: [{"content": [image(b"one")]}]})
        for field in ("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2")
    ),
    *(
        (path, {"query": "cats", "documents": [{"content": [image(b"one")]}]})
        for path in ("/rerank", "/invocations", "/v1/score", "/v1/rerank", "/v2/rerank")
    ),
    ("/rerank", {"query": {"content": [image(b"one")]}, "documents": ["cats"]}),
    ("/pooling", {"messages": user({"image_url": "http://127.0.0.1/cat.png"})}),
    ("/prefix/v1/messages", {"messages": user(IMAGE_BLOCK)}),
]


@pytest.mark.parametrize(("path", "body"), ELSEWHERE)
async def test_media_elsewhere_are_refused_by_name(
    stack: Stack, encoder: Encoder, path: str, body: dict[str, Any]
) -> None:
    client = await stack.post(json.dumps({"model": "m", **body}).encode(), path=path)
    assert client.status == 400
    assert client.error == (
        f"{path.removeprefix('/prefix')} takes no media on this server, whose encoder is elsewhere; {PATH} does"
    )
    assert encoder.items == []
    assert stack.app.body == b""


SCHEMA = {
    "type": "object",
    "properties": {"image_url": {"type": "string"}, "input_audio": {"type": "object"}},
    "required": ["image_url"],
}


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":   "text with an image_url"}',
        b'{"input": [1, 2, 3]}',
        json.dumps({"messages": user({"type": "text", "text": "input_image"}), "system": "x"}).encode(),
        json.dumps({"input": user({"type": "input_text", "text": "?"}), "tools": [{"type": "function"}]}).encode(),
        json.dumps({"messages": user({"type": "tool_result", "content": "image"})}).encode(),
        *(
            json.dumps({"input": "draw", "messages": user({"type": "text", "text": "draw"}), **more}).encode()
            for more in (
                {"tools": [{"type": "function", "name": "show", "parameters": SCHEMA}]},
                {"tools": [{"name": "show", "input_schema": SCHEMA}]},
                {"tools": [{"type": "function", "function": {"name": "show", "parameters": SCHEMA}}]},
                {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            )
        ),
        b'{"input": ' + b"[" * 600 + b"]" * 600 + b"}",
        b'{"messages": 5, "input": null}',
        b"[1, 2]",
        b"no json",
        b"",
    ],
)
@pytest.mark.parametrize("path", endpoints.OTHERS)
async def test_without_media_other_endpoints_are_as_ever(
    stack: Stack, encoder: Encoder, path: str, body: bytes
) -> None:
    stack.app.messages = response(200, ROLE, FAILED, b"")
    client = await stack.post(body, path=path, headers=[(b"content-length", b"5")])
    assert client.messages == stack.app.messages
    assert stack.app.body == body
    assert stack.app.headers == {b"content-length": b"5"}
    assert encoder.items == []


URLS = ["data:image/png;base64,AAAA"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/v1/systemone", {"state": "?", "questions": {}, field: URLS}) for field in ("images", "audio", "videos")),
        ("/inference/v1/generate", {"token_ids": [1], "content_parts": [image(b"one")]}),  # with --enable-scale-out
    ],
)
async def test_media_at_endpoints_that_are_easily_overlooked(stack: Stack, path: str, body: dict[str, Any]) -> None:
    assert (await stack.post(json.dumps({"model": "m", **body}).encode(), path=path)).status == 400


# What the producer must have


async def test_settings_of_the_server_go_along(stack: Stack, encoder: Encoder) -> None:
    await stack.post(chat(b"one"))
    stack = Stack([encoder.address])
    stack.model_config.multimodal_config = SimpleNamespace(**SETTINGS)
    await stack.post(chat(b"one"))
    unset, found = ({name: json.loads(value) for name, value in settings.items()} for settings in encoder.settings)
    assert unset == {"mm_processor_kwargs": {}, "media_io_kwargs": {}}
    assert found == SETTINGS


@pytest.mark.parametrize(
    ("own", "difference"),
    [
        (
            SETTINGS | {"mm_processor_kwargs": {"max_pixels": 999}},
            'mm_processor_kwargs is {"max_pixels": 999} at the encoder service and {"max_pixels": 1000} at its client',
        ),
        (
            {"mm_processor_kwargs": SETTINGS["mm_processor_kwargs"]},
            'media_io_kwargs is {} at the encoder service and {"video": {"num_frames": 4}} at its client',
        ),
    ],
)
async def test_settings_that_differ_are_told_with_both_values(own: dict[str, Any], difference: str) -> None:
    """By the producer's own server; what it would need for encoding is not there."""
    info = pb.GetModelInfoResponse(limits=pb.Limits(max_items_per_request=8, max_request_bytes=1000))
    nothing: Any = None
    servicer = Servicer(nothing, nothing, {}, info, nothing, settings=own)
    server = grpc.aio.server()
    add_EncoderCacheServicer_to_server(servicer, server)
    stack = Stack([f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"])
    stack.model_config.multimodal_config = SimpleNamespace(**SETTINGS)
    await server.start()
    client = await stack.post(chat(b"one"))
    await server.stop(grace=None)
    assert client.status == 502
    assert client.error.endswith(f"failed: {difference}")
    assert stack.app.body == b""


# URLs


def at(url: str, kind: str = "image_url") -> bytes:
    return json.dumps({"messages": user({"type": kind, kind: {"url": url}})}).encode()


@pytest.mark.parametrize("path", [PATH, TOKENIZE])
@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
async def test_a_url_is_fetched(stack: Stack, encoder: Encoder, file_server: FileServer, path: str, kind: str) -> None:
    file_server.files["/cat"] = b"cat"
    assert (await stack.post(at(f"{file_server.url}/cat", kind), path=path)).status == 200
    assert encoder.items == [b"cat"]
    assert file_server.url.encode() not in stack.app.body


async def test_only_domains_that_vllm_allows(stack: Stack, encoder: Encoder, file_server: FileServer) -> None:
    stack.model_config.allowed_media_domains = ["example.org"]
    client = await stack.post(at(f"{file_server.url}/cat"))
    assert client.status == 400
    assert "example.org" in client.error
    assert (file_server.requests, encoder.items) == ([], [])


@pytest.mark.parametrize(("status", "expected"), [(404, 422), (500, 502)])
async def test_a_url_that_leads_nowhere(
    pair: Stack, encoder: Encoder, second: Encoder, file_server: FileServer, status: int, expected: int
) -> None:
    """No producer can help."""
    file_server.statuses["/cat"] = status
    client = await pair.post(at(f"{file_server.url}/cat"))
    assert client.status == expected
    assert str(status) in client.error
    assert file_server.requests == ["/cat"]
    assert encoder.items + second.items == []
    assert pair.app.body == b""


async def test_too_large_a_file_at_a_url(encoder: Encoder, file_server: FileServer) -> None:
    file_server.files["/cat"] = b"x" * 1001
    stack = Stack([encoder.address], max_body_bytes=1000)
    client = await stack.post(at(f"{file_server.url}/cat"))
    assert client.status == 400
    assert client.error.startswith("the image is not fetched: ")
    assert encoder.items == []


async def test_a_url_is_fetched_once_for_all_producers(
    pair: Stack, encoder: Encoder, second: Encoder, file_server: FileServer
) -> None:
    file_server.files["/cat"] = next(files_of(pair, encoder))
    encoder.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (await pair.post(at(f"{file_server.url}/cat"))).status == 200
    assert second.items == encoder.items == [file_server.files["/cat"]]
    assert file_server.requests == ["/cat"]


# What passes untouched


@pytest.mark.parametrize(
    "body",
    [
        chat(),
        b'{"messages": [{"content": "text"}],   "unusual":1.50}',
        b'{"messages": 5}',
        b"[1, 2]",
        b'"text"',
        b"no json",
        b"\xff\xfe",
        b"",
        b"[" * 100_000,
    ],
)
async def test_a_body_without_media(stack: Stack, encoder: Encoder, body: bytes) -> None:
    client = await stack.post(body, headers=[(b"content-length", b"5")])
    assert client.messages == response(200, b"{}")
    assert stack.app.body == body
    assert stack.app.headers == {b"content-length": b"5"}
    assert encoder.items == []


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": PATH},
        {"type": "http", "method": "GET", "path": PATH},
        {"type": "http", "method": "POST", "path": "/v1/completions"},
        {"type": "http", "method": "POST", "path": PATH + "/derender"},
        {"type": "http", "method": "POST", "path": "/detokenize"},
        {"type": "http", "method": "GET", "path": TOKENIZE},
        {"type": "http", "method": "GET", "path": "/v1/responses"},
        {"type": "http", "method": "POST", "path": "/v1/responses/1/cancel"},
    ],
)
async def test_everything_else(scope: dict[str, Any]) -> None:
    """The app gets the very same objects; not even settings are looked for."""
    calls = []

    async def app(*arguments: Any) -> None:
        calls.append(arguments)

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    await EncodeMiddleware(app)(scope, receive, send)
    assert calls == [(scope, receive, send)]
    assert calls[0][0] is scope


# Refusals


async def test_what_cannot_be_served_is_a_bad_request(stack: Stack, encoder: Encoder) -> None:
    client = await stack.post(chat(b"one", mm_processor_kwargs={"fps": 1}))
    assert client.status == 400
    assert "mm_processor_kwargs cannot be set" in client.error
    assert json.loads(client.body)["error"]["type"] == "BadRequestError"
    assert encoder.items == []
    assert stack.app.body == b""


@pytest.mark.parametrize("chunks", [[b"x" * 1001], [b"x" * 600, b"x" * 401]])
async def test_too_large_a_body(encoder: Encoder, chunks: list[bytes]) -> None:
    stack = Stack([encoder.address], max_body_bytes=1000)
    client = await stack.post(*chunks)
    assert client.status == 413
    assert client.error == "the request has more than 1000 bytes"
    assert (await stack.post(b"x" * 1000)).status == 200


CODES = [
    (grpc.StatusCode.INVALID_ARGUMENT, 400, False),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, True),
    (grpc.StatusCode.UNAVAILABLE, 503, True),
    (grpc.StatusCode.DEADLINE_EXCEEDED, 504, False),
    (grpc.StatusCode.INTERNAL, 502, False),
    (grpc.StatusCode.FAILED_PRECONDITION, 502, False),
]


@pytest.mark.parametrize(("code", "status", "may_retry"), CODES)
async def test_an_item_that_fails(
    stack: Stack, encoder: Encoder, code: grpc.StatusCode, status: int, may_retry: bool
) -> None:
    """The others' tickets are given back."""
    encoder.errors = {b"two": code}
    client = await stack.post(chat(b"one", b"two", b"three"))
    assert client.status == status
    assert client.error == "image 2 of 3: no image"
    assert (b"retry-after" in client.headers) is may_retry
    assert sorted(encoder.released) == [f"{0:032x}", f"{2:032x}"]
    assert stack.app.body == b""


@pytest.mark.parametrize(("code", "status", "may_retry"), CODES)
async def test_a_call_that_fails(
    stack: Stack, encoder: Encoder, code: grpc.StatusCode, status: int, may_retry: bool
) -> None:
    encoder.refuse(code)
    client = await stack.post(chat(b"one"))
    assert client.status == status
    assert client.error == f"encoding at {encoder.address} failed: not now"
    assert (b"retry-after" in client.headers) is may_retry


async def test_a_producer_that_is_down() -> None:
    """It is said at once: the time for encoding is longer than the test's."""
    stack = Stack([f"127.0.0.1:{free_port()}"], encode_timeout_s=10 * BOUND_S)
    for _ in range(2):
        client = await stack.post(chat(b"one"))
        assert client.status == 503
        assert "failed to connect" in client.error
        assert client.headers[b"retry-after"] == b"1"


async def test_a_producer_that_does_not_answer(encoder: Encoder) -> None:
    async def wait(context: Any) -> pb.EncodeResponse:
        await asyncio.sleep(BOUND_S)
        raise AssertionError

    encoder.answer = wait
    client = await Stack([encoder.address], encode_timeout_s=0.2).post(chat(b"one"))
    assert client.status == 504
    assert "Deadline Exceeded" in client.error


@pytest.mark.parametrize(
    "outcomes",
    [
        pytest.param([], id="too few"),
        pytest.param([ticket(0), ticket(1)], id="too many"),
        pytest.param([ticket(0, dtype="float64")], id="dtype"),
        pytest.param([ticket(0, key="x")], id="key"),
        pytest.param([ticket(0, content_part="")], id="no content part"),
        pytest.param([ticket(0, content_part=json.dumps(stand_in(1)))], id="another's content part"),
    ],
)
async def test_a_producer_that_answers_nonsense(stack: Stack, encoder: Encoder, outcomes: list[pb.Ticket]) -> None:
    async def answer(context: Any) -> pb.EncodeResponse:
        return pb.EncodeResponse(outcomes=[pb.ItemOutcome(ticket=one) for one in outcomes])

    encoder.answer = answer
    assert (await stack.post(chat(b"one"))).status == 502


async def test_without_a_connector_it_says_so(stack: Stack) -> None:
    stack.vllm_config.ec_transfer_config = None
    client = await stack.post(chat(b"one"))
    assert client.status == 500
    assert client.error == "EncodeMiddleware needs --ec-transfer-config with consumer_shim.connector"


# Answers

ROLE = b'data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a cat"}}]}\n\n'
FAILED = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"


async def answer(stack: Stack, messages: list[Message], failures: dict[str, Failure], body: bytes) -> Client:
    """What a client gets when the app answers `messages`, and the engine knows `failures` by lease."""
    stack.app.messages = messages
    with engine_of(stack, failures):
        return await stack.post(body)


@pytest.mark.parametrize(
    "messages",
    [
        response(500, b'{"error":{"message":"Internal server error"}}'),
        response(500, b'{"error":', b"{}}"),
        response(200, FAILED, DONE, b""),
        response(200, ROLE, FAILED, DONE, b""),
        response(200, ROLE, ROLE, ROLE, FAILED, DONE, b""),
    ],
)
async def test_a_failure_gets_its_reason(stack: Stack, encoder: Encoder, messages: list[Message]) -> None:
    late = Failure(504, "the embedding did not arrive")
    client = await answer(stack, messages, {LEASE: late}, chat(b"one"))
    assert client.status == 504
    assert client.error == late.message
    assert b"x-app" not in client.headers
    assert encoder.items == [b"one"]


@pytest.mark.parametrize("lost", [GONE, Failure(502, "it is torn")])
@pytest.mark.parametrize("messages", [response(500, b"{}"), response(200, ROLE, FAILED, DONE, b"")])
async def test_a_lost_embedding_is_encoded_again(
    stack: Stack, encoder: Encoder, messages: list[Message], lost: Failure
) -> None:
    before = total(REGISTRY, "shim_reencodes_total")
    stack.app.then = response(200, ROLE, WORD, DONE, b"")
    client = await answer(stack, messages, {LEASE: lost}, chat(b"one"))
    assert client.messages == stack.app.then
    assert encoder.items == [b"one", b"one"]
    assert total(REGISTRY, "shim_reencodes_total") == before + 1
    assert int(stack.app.headers[b"content-length"]) == len(stack.app.body)


@pytest.mark.parametrize("messages", [response(500, b"{}"), response(200, ROLE, FAILED, DONE, b"")])
async def test_an_embedding_that_is_lost_twice_is_told(stack: Stack, encoder: Encoder, messages: list[Message]) -> None:
    client = await answer(stack, messages, {LEASE: GONE}, chat(b"one"))
    assert client.status == 503
    assert client.error == GONE.message
    assert encoder.items == [b"one", b"one"]


async def test_a_lost_embedding_is_not_encoded_again_on_an_empty_budget(
    stack: Stack, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where many are lost at once, encoding all of them again would be a storm."""
    monkeypatch.setattr(budget, "PROCESS", RetryBudget(share=0.0, floor=0.0))
    client = await answer(stack, response(500, b"{}"), {LEASE: GONE}, chat(b"one"))
    assert (client.status, client.error) == (503, GONE.message)
    assert encoder.items == [b"one"]


async def test_after_the_first_word_nothing_is_begun_again(stack: Stack, encoder: Encoder) -> None:
    messages = response(200, ROLE, WORD, FAILED, DONE, b"")
    before = total(REGISTRY, "shim_reencodes_total")
    client = await answer(stack, messages, {LEASE: GONE}, chat(b"one"))
    assert client.messages == messages
    assert encoder.items == [b"one"]
    assert total(REGISTRY, "shim_reencodes_total") == before


@pytest.mark.parametrize(
    "messages",
    [
        response(500, b"Internal server error"),
        response(200, FAILED, DONE, b""),
        response(200, ROLE, FAILED, DONE, b""),
    ],
)
async def test_a_failure_without_a_reason_stays(stack: Stack, messages: list[Message]) -> None:
    client = await answer(stack, messages, {"other": GONE}, chat(b"one"))
    assert client.messages == messages


@pytest.mark.parametrize(
    "messages",
    [
        response(200, b'{"choices":[]}'),
        response(200, b""),
        response(400, b'{"error":{"message":"no"}}'),
        response(200, ROLE, WORD, FAILED, DONE, b""),
        response(200, *[ROLE] * 100, FAILED, DONE, b""),
    ],
)
async def test_other_answers_stay(stack: Stack, messages: list[Message]) -> None:
    client = await answer(stack, messages, {LEASE: GONE}, chat(b"one"))
    assert client.messages == messages


async def test_a_stream_is_not_held_back(stack: Stack) -> None:
    """From its first word on, each piece reaches the client before the next one is made."""
    stack.app.messages = response(200, ROLE, WORD, WORD, DONE, b"")
    client = await stack.post(chat(b"one"))
    assert client.messages == stack.app.messages
    assert stack.app.sent == [0, 0, 3, 4, 5, 6]


async def test_without_tickets_nothing_is_held_back(stack: Stack) -> None:
    stack.app.messages = response(200, ROLE, FAILED, b"")
    client = await answer(stack, stack.app.messages, {LEASE: GONE}, chat())
    assert client.messages == stack.app.messages
    assert stack.app.sent == [1, 2, 3, 4]


async def test_tickets_that_a_client_brings_are_explained_too(stack: Stack, encoder: Encoder) -> None:
    await stack.post(chat(b"one"))
    again = stack.app.body
    stack.app.body = b""
    client = await answer(stack, response(500, b"Internal server error"), {LEASE: GONE}, again)
    assert client.error == GONE.message
    assert stack.app.body == again
    assert encoder.items == [b"one"]


async def test_malformed_tickets_that_a_client_brings(stack: Stack) -> None:
    client = await stack.post(chat(ec_transfer_params={"ec_producer_tickets": [{"key": 1}]}))
    assert client.status == 400
    assert "ec_producer_tickets" in client.error
    assert stack.app.body == b""
