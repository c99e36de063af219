"""The middleware between an ASGI server and vLLM's app, with a real gRPC producer on loopback."""

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from consumer_shim.middleware import EncodeMiddleware
from consumer_shim.pull import Failure
from consumer_shim.reasons import ReasonServer
from consumer_shim.tickets import from_params
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheServicer, add_EncoderCacheServicer_to_server
from tests.kit.ports import free_port

BOUND_S = 20.0
PATH = "/v1/chat/completions"
Message = MutableMapping[str, Any]


class Encoder(EncoderCacheServicer):
    """Gives a ticket for each item, or what a test says. It encodes nothing, and grants no leases."""

    address: str

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.released: list[str] = []
        self.errors: dict[int, grpc.StatusCode] = {}
        """The error of an item, by its place."""
        self.answer: Callable[[Any], Awaitable[pb.EncodeResponse]] | None = None

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        self.items += [item.data for item in request.items]
        if self.answer is not None:
            return await self.answer(context)
        return pb.EncodeResponse(outcomes=[self._outcome(place) for place, _ in enumerate(request.items)])

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self.released.append(request.lease_id)
        return pb.ReleaseResponse(released=True)

    def _outcome(self, place: int) -> pb.ItemOutcome:
        if place in self.errors:
            code = self.errors[place]
            return pb.ItemOutcome(error=status_pb2.Status(code=code.value[0], message="no image"))
        return pb.ItemOutcome(ticket=ticket(place))


def ticket(place: int, **changes: Any) -> pb.Ticket:
    fields = {"modality": pb.MODALITY_IMAGE, "num_rows": 4, "width": 8, "dtype": "float32", "epoch": "0" * 16}
    fields |= {"key": f"{place:064x}", "lease_id": f"{place:032x}"}
    message = pb.Ticket(**(fields | changes))
    message.metadata["image_grid_thw"].CopyFrom(pb.NumberArray(shape=[3], ints=[1, 8, 10]))
    return message


@pytest.fixture
async def encoder() -> AsyncIterator[Encoder]:
    encoder = Encoder()
    server = grpc.aio.server()
    add_EncoderCacheServicer_to_server(encoder, server)
    encoder.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield encoder
    await server.stop(grace=None)


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

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        self.body = b""
        more = True
        while more:
            message = await receive()
            self.body += message.get("body", b"")
            more = message.get("more_body", False)
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
        self.vllm_config = SimpleNamespace(ec_transfer_config=transfer)
        self.middleware = EncodeMiddleware(self.app)

    def scope(self, **changes: Any) -> dict[str, Any]:
        state = SimpleNamespace(vllm_config=self.vllm_config)
        headers = [(b"Content-Type", b"application/json"), (b"authorization", b"Bearer x")]
        fields = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
        return fields | {"app": SimpleNamespace(state=state)} | changes

    async def post(self, *chunks: bytes, **changes: Any) -> Client:
        """A request with its body in `chunks`; the client leaves once it has sent them."""
        client = self.app.client = Client()
        pieces: list[Message] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        pieces[-1]["more_body"] = False
        arriving = iter([*pieces, {"type": "http.disconnect"}])

        async def receive() -> Message:
            return next(arriving, {"type": "http.disconnect"})

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
    assert [part["uuid"] for part in content[1:]] == [f"{0:064x}", f"{1:064x}"]
    assert [part["image_embeds"] for part in content[1:]] == [{"image_grid_thw": [1, 8, 10]}] * 2
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
    assert stack.app.headers == expected
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

    encoder.errors = {0: grpc.StatusCode.UNAVAILABLE}
    stack.middleware = EncodeMiddleware(bad_body)
    client = await stack.post(chat(b"one"))
    assert client.status == 503
    assert client.error == "image 1 of 1: no image"


async def test_producers_take_turns(encoder: Encoder) -> None:
    absent = f"127.0.0.1:{free_port()}"
    stack = Stack([encoder.address, absent])
    statuses = [(await stack.post(chat(b"one"))).status for _ in range(4)]
    assert statuses == [200, 503, 200, 503]


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
        {"type": "http", "method": "POST", "path": PATH + "/render"},
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
    encoder.errors = {1: code}
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
    async def refuse(context: Any) -> pb.EncodeResponse:
        await context.abort(code, "not now")
        raise AssertionError

    encoder.answer = refuse
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
GONE = Failure(503, "the embedding has gone")
LEASE = f"{0:032x}"


async def answer(stack: Stack, messages: list[Message], failures: dict[str, Failure], body: bytes) -> Client:
    """What a client gets when the app answers `messages`, and the engine knows `failures` by lease."""
    stack.app.messages = messages
    server = ReasonServer(stack.engine_id, failures.get)
    try:
        return await stack.post(body)
    finally:
        server.close()


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
    stack.app.then = response(200, ROLE, WORD, DONE, b"")
    client = await answer(stack, messages, {LEASE: lost}, chat(b"one"))
    assert client.messages == stack.app.then
    assert encoder.items == [b"one", b"one"]
    assert int(stack.app.headers[b"content-length"]) == len(stack.app.body)


@pytest.mark.parametrize("messages", [response(500, b"{}"), response(200, ROLE, FAILED, DONE, b"")])
async def test_an_embedding_that_is_lost_twice_is_told(stack: Stack, encoder: Encoder, messages: list[Message]) -> None:
    client = await answer(stack, messages, {LEASE: GONE}, chat(b"one"))
    assert client.status == 503
    assert client.error == GONE.message
    assert encoder.items == [b"one", b"one"]


async def test_after_the_first_word_nothing_is_begun_again(stack: Stack, encoder: Encoder) -> None:
    messages = response(200, ROLE, WORD, FAILED, DONE, b"")
    client = await answer(stack, messages, {LEASE: GONE}, chat(b"one"))
    assert client.messages == messages
    assert encoder.items == [b"one"]


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
