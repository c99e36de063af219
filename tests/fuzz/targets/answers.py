"""What a producer answers the shim: outcomes, errors and their details, leases."""

import asyncio
import copy
import json
from random import Random
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from consumer_shim import retries
from consumer_shim.client import AsyncProducer, Lease, Producer
from consumer_shim.errors import ProducerError
from consumer_shim.gateway import encode_request
from consumer_shim.rewrite import RequestError, tickets_in
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.fuzz.checks import check_said, expect
from tests.fuzz.loopback import Answerer, Refusal
from tests.fuzz.mutate import AnyBytes, message, with_kind

_KEY, _LEASE = "ab" * 32, "cd" * 16
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
_TEXT = {"type": "text", "text": "what is it"}
_TIMEOUT_S = 10.0
_MAX_REPEATED = 1000
"""What a producer says is its own affair: the shim repeats it."""


class _Shim:
    """The shim's clients, and a producer that answers what it was given."""

    def __init__(self) -> None:
        assert retries._FIRST_DELAY_S
        retries._FIRST_DELAY_S = 1e9  # nothing is sent again
        self.answer: bytes | Refusal = b""
        self.released: set[str] = set()
        answerer = Answerer({"Encode": self._said, "Acquire": self._said, "Release": self._release})
        self.loop = asyncio.new_event_loop()
        self.client = Producer(answerer.address)
        self._async_client = self.loop.run_until_complete(self._client(answerer.address))

    async def _client(self, address: str) -> AsyncProducer:
        return AsyncProducer(address)

    def _said(self, request: bytes) -> bytes:
        if isinstance(self.answer, Refusal):
            raise self.answer
        return self.answer

    def _release(self, request: bytes) -> bytes:
        released = pb.ReleaseRequest.FromString(request)
        self.released |= {released.lease_id, *released.lease_ids}
        return b""

    def encode(self, body: dict[str, Any]) -> list[pb.Ticket]:
        self.released.clear()
        return self.loop.run_until_complete(encode_request(body, self._async_client, _TIMEOUT_S))

    def acquire(self) -> Lease:
        return self.client.acquire(key=_KEY, epoch="", lease_id="", transport="shm", timeout_s=_TIMEOUT_S)


_shim: Any = None


def _encode(data: bytes) -> None:
    """An EncodeResponse, for a request with as many images as it has outcomes, or one more."""
    answer = _message(pb.EncodeResponse, data)
    if answer is None or len(answer.outcomes) > 32:
        return
    num_images = max(1, len(answer.outcomes) - (len(data) % 8 == 0))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [*[_IMAGE] * num_images, _TEXT]}]}
    before = copy.deepcopy(body)
    _shim.answer = data
    leases = {outcome.ticket.lease_id for outcome in answer.outcomes if outcome.HasField("ticket")}
    try:
        tickets = _shim.encode(body)
    except RequestError as error:
        expect(400 <= error.status <= 599, f"a refusal has status {error.status}")
        check_said(str(error), data, _MAX_REPEATED + len(data))
        expect(body == before, "a refused request was changed")
        if num_images == len(answer.outcomes):
            expect(leases <= _shim.released, "a refused request keeps leases")
        return
    expect(len(tickets) == num_images, f"{num_images} images have {len(tickets)} tickets")
    expect(body["messages"][0]["content"][-1] == _TEXT, "the text is lost")
    again = json.loads(json.dumps(body))
    expect([ticket.lease_id for ticket in tickets_in(again)] == [ticket.lease_id for ticket in tickets], "tickets lost")


def _status(data: bytes) -> None:
    """The error of an item."""
    status = _message(status_pb2.Status, data)
    if status is not None:
        _check_error(ProducerError.from_status(status))


def _call(data: bytes) -> None:
    """The details of a call's error."""
    _shim.answer = Refusal(grpc.StatusCode.INTERNAL, data)
    try:
        _shim.acquire()
    except ProducerError as error:
        _check_error(error)


def _lease(data: bytes) -> None:
    """An AcquireResponse."""
    answer = _message(pb.AcquireResponse, data)
    if answer is None:
        return
    _shim.answer = data
    try:
        lease = _shim.acquire()
    except ProducerError as error:
        _check_error(error)
        return
    expect(lease.block.lease_id == answer.lease_id, "the lease is another")


def _check_error(error: ProducerError) -> None:
    expect(isinstance(error.code, grpc.StatusCode), f"the code is {error.code}")
    expect(isinstance(error.reason, str), f"the reason is {error.reason}")
    expect(isinstance(error.retry_delay_s, float), f"the delay is {error.retry_delay_s}")


def _message(kind: Any, data: bytes) -> Any:
    """gRPC itself refuses what is no such message."""
    try:
        return kind.FromString(data)
    except Exception:
        return None


_KINDS = (_encode, _status, _call, _lease)


def target(data: bytes) -> None:
    """The first byte says what the rest is."""
    global _shim
    _shim = _shim or _Shim()
    if data:
        _KINDS[data[0] % len(_KINDS)](data[1:])


_PART = {"type": "image_embeds", "uuid": _KEY, "image_embeds": {"image_grid_thw": [1, 2, 2]}}
_WORDS = (
    *(
        _KEY,
        _LEASE,
        "00" * 8,
        "float32",
        "bfloat16",
        "QUEUE_FULL",
        "shm",
        "x",
        json.dumps(_PART),
        "[" * 990 + "]" * 990,
    ),
    *(json.dumps({**_PART, "type": "image_url"}), f'{{"type": "image_url", "uuid": "{_KEY}", "image_url": "data:,"}}'),
    *("type.googleapis.com/google.rpc.RetryInfo", "type.googleapis.com/google.rpc.ErrorInfo", "type.googleapis.com/"),
    *(f'{{"uuid": "{_KEY}", "type": ["image_embeds"]}}', f'{{"uuid": "{_KEY}"}}', "[]", "null"),
)
_DELAYS = [(0, 0), (1, 1), (-1, 0), (2**63 - 1, 0), (315_576_000_000, 0), (10**12, 999_999_999), (0, -(2**31))]


def _with_details(one: Any) -> Any:
    """Now and then the details of the first status inside are made odd, but whole."""

    def changed(data: bytes, most: int, dice: Random, any_bytes: AnyBytes) -> bytes:
        if dice.random() < 0.7:
            return one(data, most, dice, any_bytes)  # type: ignore[no-any-return]
        seconds, nanos = dice.choice(_DELAYS)
        detail = error_details_pb2.RetryInfo()
        detail.retry_delay.seconds, detail.retry_delay.nanos = seconds, nanos
        status = status_pb2.Status(code=dice.randrange(18), message="no")
        status.details.add().Pack(detail)
        if dice.random() < 0.3:
            status.details[0].value = any_bytes(status.details[0].value, 64)
        return status.SerializeToString()[:most]

    return changed


mutate = with_kind(
    4,
    (
        message(pb.EncodeResponse, _WORDS),
        _with_details(message(status_pb2.Status, _WORDS)),
        _with_details(message(status_pb2.Status, _WORDS)),
        message(pb.AcquireResponse, _WORDS),
    ),
)


def seeds() -> dict[str, bytes]:
    ticket = pb.Ticket(
        key=_KEY,
        modality=pb.MODALITY_IMAGE,
        num_rows=1,
        width=8,
        dtype="float32",
        epoch="00" * 8,
        lease_id=_LEASE,
        content_part=json.dumps(_PART),
    )
    ticket.lease_ttl.seconds = 60
    status = status_pb2.Status(code=8, message="full")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="ec-producer"))
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds = 1
    status.details.add().Pack(retry)
    descriptor = pb.Descriptor(transport="shm", address=0, length=224, generation=1, peer="x")
    lease = pb.AcquireResponse(lease_id=_LEASE, descriptor=descriptor)
    lease.lease_ttl.seconds = 60
    outcomes = [pb.ItemOutcome(ticket=ticket), pb.ItemOutcome(error=status)]
    return {
        "ticket": b"\0" + pb.EncodeResponse(outcomes=outcomes[:1]).SerializeToString(),
        "mixed": b"\0" + pb.EncodeResponse(outcomes=outcomes).SerializeToString(),
        "status": b"\1" + status.SerializeToString(),
        "call": b"\2" + status.SerializeToString(),
        "lease": b"\3" + lease.SerializeToString(),
    }
