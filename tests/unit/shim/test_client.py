"""Calls to a producer, over real gRPC on loopback."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from prometheus_client import REGISTRY

from consumer_shim import client, retries
from consumer_shim.client import AsyncProducer, Lease, Producer, ProducerError
from producer.transport.base import BlockDescriptor
from producer.wire.block import BlockError, BlockIdentity, EmbeddingShape, write_block
from producer.wire.contract import ERROR_DOMAIN, WIRE_VERSION
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheServicer, add_EncoderCacheServicer_to_server
from tests.kit.ports import free_port
from tests.kit.samples import total
from tests.unit.conftest import Clock

BOUND_S = 20.0
SHAPE = EmbeddingShape(num_rows=4, width=8, dtype="float32")
ROWS = bytes(range(128))
TICKET = pb.Ticket(
    key="ab" * 32,
    modality=pb.MODALITY_IMAGE,
    num_rows=4,
    width=8,
    dtype="float32",
    epoch=f"{255:016x}",
    lease_id="1" * 32,
)
ITEM = pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"file")


def block(**changes: Any) -> bytes:
    identity = BlockIdentity(**({"key": b"\xab" * 32, "epoch": 255, "generation": 7} | changes))
    memory = memoryview(bytearray(SHAPE.block_bytes))
    write_block(memory, identity, SHAPE, memoryview(ROWS))
    return bytes(memory)


def status(code: grpc.StatusCode, reason: str, message: str, retry_delay_s: float = 0.0) -> status_pb2.Status:
    found = status_pb2.Status(code=code.value[0], message=message)
    found.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN))
    if retry_delay_s:
        delay = Duration(nanos=int(retry_delay_s * 1e9))
        found.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return found


class ScriptedProducer(EncoderCacheServicer):
    """Answers each call as `answers` says, and remembers the requests. It has no pool and no leases."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.answers: dict[str, Callable[[grpc.ServicerContext], Any]] = {
            "Acquire": lambda context: pb.AcquireResponse(
                lease_id="2" * 32,
                lease_ttl=Duration(seconds=3, nanos=500_000_000),
                descriptor=pb.Descriptor(
                    transport="grpc",
                    address=4096,
                    length=SHAPE.block_bytes,
                    generation=7,
                    peer="end",
                    peer_metadata=b"\x00\xff",
                ),
            ),
            "Release": lambda context: pb.ReleaseResponse(released=True),
            "Fetch": lambda context: [pb.FetchResponse(data=block()[:100]), pb.FetchResponse(data=block()[100:])],
            "GetModelInfo": lambda context: pb.GetModelInfoResponse(model="m", transports=["nixl", "grpc"]),
            "Encode": lambda context: pb.EncodeResponse(
                outcomes=[
                    pb.ItemOutcome(ticket=TICKET),
                    pb.ItemOutcome(error=status(grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_UNREADABLE", "no image")),
                    pb.ItemOutcome(error=status_pb2.Status(code=999, message="what?")),
                ]
            ),
        }

    def _answer(self, name: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        return self.answers[name](context)

    def Encode(self, request: Any, context: Any) -> Any:
        return self._answer("Encode", request, context)

    def Acquire(self, request: Any, context: Any) -> Any:
        return self._answer("Acquire", request, context)

    def Release(self, request: Any, context: Any) -> Any:
        return self._answer("Release", request, context)

    def Fetch(self, request: Any, context: Any) -> Any:
        yield from self._answer("Fetch", request, context)

    def GetModelInfo(self, request: Any, context: Any) -> Any:
        return self._answer("GetModelInfo", request, context)

    def refuse(self, name: str, *, code: grpc.StatusCode, reason: str, message: str) -> None:
        """Has a call end with an error as the producer tells it."""
        details = (("grpc-status-details-bin", status(code, reason, message).SerializeToString()),)

        def abort(context: grpc.ServicerContext) -> None:
            context.set_trailing_metadata(details)
            context.abort(code, message)

        self.answers[name] = abort

    def hang(self, name: str) -> None:
        """Has a call take longer than its caller waits."""

        def wait(context: grpc.ServicerContext) -> Any:
            while context.is_active():
                time.sleep(0.01)

        self.answers[name] = wait


@pytest.fixture
def script() -> ScriptedProducer:
    return ScriptedProducer()


@contextlib.contextmanager
def serving(script: ScriptedProducer, port: int = 0) -> Iterator[int]:
    """Yields the port, any free one by default."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_EncoderCacheServicer_to_server(script, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    yield port
    server.stop(grace=None).wait(BOUND_S)


@pytest.fixture
def producer(script: ScriptedProducer) -> Iterator[Producer]:
    with serving(script) as port:
        producer = Producer(f"127.0.0.1:{port}")
        yield producer
        producer.close()


@pytest.fixture
def absent() -> Iterator[Producer]:
    """Nobody listens there."""
    producer = Producer(f"127.0.0.1:{free_port()}")
    yield producer
    producer.close()


def acquire(producer: Producer, timeout_s: float = BOUND_S) -> Lease:
    return producer.acquire(key="k", epoch="e", lease_id="l", transport="nixl", timeout_s=timeout_s)


CALLS: dict[str, Callable[[Producer, float], object]] = {
    "GetModelInfo": lambda producer, timeout_s: producer.info(timeout_s),
    "Encode": lambda producer, timeout_s: producer.encode([ITEM], timeout_s),
    "Acquire": acquire,
    "Fetch": lambda producer, timeout_s: producer.fetch(TICKET, timeout_s),
}


def test_info(producer: Producer) -> None:
    assert list(producer.info(BOUND_S).transports) == ["nixl", "grpc"]


def test_each_item_has_its_outcome(producer: Producer, script: ScriptedProducer) -> None:
    found = producer.encode([ITEM, ITEM, ITEM], BOUND_S)
    assert script.requests == [pb.EncodeRequest(items=[ITEM, ITEM, ITEM], wire_version=WIRE_VERSION)]
    assert found[0] == TICKET
    described = [(one.code, one.reason, str(one)) for one in found[1:] if isinstance(one, ProducerError)]
    assert described == [
        (grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_UNREADABLE", "no image"),
        (grpc.StatusCode.UNKNOWN, "", "what?"),
    ]


def test_a_lease_and_its_descriptor(producer: Producer, script: ScriptedProducer) -> None:
    lease = acquire(producer)
    assert script.requests == [
        pb.AcquireRequest(key="k", epoch="e", lease_id="l", transport="nixl", wire_version=WIRE_VERSION)
    ]
    assert lease == Lease(
        block=BlockDescriptor(
            transport="grpc",
            lease_id="2" * 32,
            address=4096,
            num_bytes=SHAPE.block_bytes,
            generation=7,
            peer="end",
            peer_metadata=b"\x00\xff",
        ),
        ttl_s=3.5,
    )


def test_fetching(producer: Producer, script: ScriptedProducer) -> None:
    assert producer.fetch(TICKET, BOUND_S) == ROWS
    acquired, fetched, released = script.requests
    assert (acquired.key, acquired.epoch, acquired.lease_id) == (TICKET.key, TICKET.epoch, TICKET.lease_id)
    assert fetched == pb.FetchRequest(lease_id="2" * 32)
    assert released == pb.ReleaseRequest(lease_id="2" * 32)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (block(key=b"\xcd" * 32), "the block's key is"),
        (block(epoch=1), "the block's epoch is 1, expected 255"),
        (block(generation=8), "the block's generation is 8"),
        (block()[:-1], "the block has 319 bytes, expected 320"),
        (block()[:200] + b"\xff" + block()[201:], "the checksum differs"),
    ],
)
def test_fetching_something_else(producer: Producer, script: ScriptedProducer, data: bytes, sentence: str) -> None:
    script.answers["Fetch"] = lambda context: [pb.FetchResponse(data=data)]
    with pytest.raises(BlockError, match=sentence):
        producer.fetch(TICKET, BOUND_S)
    assert script.requests[-1] == pb.ReleaseRequest(lease_id="2" * 32)


@pytest.mark.parametrize("call", CALLS)
def test_a_refusal_has_code_reason_and_message(producer: Producer, script: ScriptedProducer, call: str) -> None:
    script.refuse(call, code=grpc.StatusCode.NOT_FOUND, reason="NOT_IN_POOL", message="it has gone")
    with pytest.raises(ProducerError, match="it has gone") as refused:
        CALLS[call](producer, BOUND_S)
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.NOT_FOUND, "NOT_IN_POOL")
    assert refused.value.__cause__ is None


def test_a_refused_fetch_releases_its_lease(producer: Producer, script: ScriptedProducer) -> None:
    script.refuse("Fetch", code=grpc.StatusCode.NOT_FOUND, reason="LEASE_ENDED", message="ended")
    with pytest.raises(ProducerError):
        producer.fetch(TICKET, BOUND_S)
    assert script.requests[-1] == pb.ReleaseRequest(lease_id="2" * 32)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_has_a_deadline(producer: Producer, script: ScriptedProducer, call: str) -> None:
    script.hang("Acquire" if call == "Fetch" else call)
    with pytest.raises(ProducerError) as refused:
        CALLS[call](producer, 0.2)
    assert refused.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("call", CALLS)
def test_nobody_there(absent: Producer, call: str) -> None:
    with pytest.raises(ProducerError) as refused:
        CALLS[call](absent, BOUND_S)
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAVAILABLE, "")


def test_releasing(producer: Producer, script: ScriptedProducer) -> None:
    producer.release("3" * 32, BOUND_S)
    assert script.requests == [pb.ReleaseRequest(lease_id="3" * 32)]


def test_a_lease_that_cannot_be_released_ends_by_expiry(absent: Producer) -> None:
    absent.release("3" * 32, BOUND_S)


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_client_is_an_error_of_the_producer(producer: Producer, call: str) -> None:
    """Pulls under way meet it when the engine ends."""
    producer.close()
    with pytest.raises(ProducerError):
        CALLS[call](producer, BOUND_S)


# Sending again


def refuse(code: grpc.StatusCode, message: str = "not now") -> Callable[[grpc.ServicerContext], Any]:
    """An answer to a whole call."""

    def abort(context: grpc.ServicerContext) -> None:
        if code is FULL:
            details = status(code, "QUEUE_FULL", message).SerializeToString()
            context.set_trailing_metadata((("grpc-status-details-bin", details),))
        context.abort(code, message)

    return abort


def answer(*outcomes: pb.Ticket | grpc.StatusCode) -> Callable[[grpc.ServicerContext], Any]:
    """An answer for each item: its ticket, or an error with a delay of 0.3 s."""
    found = [
        pb.ItemOutcome(ticket=one)
        if isinstance(one, pb.Ticket)
        else pb.ItemOutcome(error=status(one, "QUEUE_FULL" if one is FULL else "", "not now", 0.3))
        for one in outcomes
    ]
    return lambda context: pb.EncodeResponse(outcomes=found)


def play(script: ScriptedProducer, *answers: Callable[[grpc.ServicerContext], Any]) -> list[float]:
    """Has each Encode answered by the next of `answers`, the last one again and again; seconds that each might take."""
    left = list(answers)
    allowed_s: list[float] = []

    def encode(context: grpc.ServicerContext) -> Any:
        allowed_s.append(context.time_remaining() or 0.0)
        return (left.pop(0) if len(left) > 1 else left[0])(context)

    script.answers["Encode"] = encode
    return allowed_s


def numbered(number: int) -> pb.Ticket:
    return pb.Ticket(key=f"{number:064x}")


def file(number: int) -> pb.MediaItem:
    return pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"%d" % number)


FULL, DOWN = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE
FILES = [file(0), file(1), file(2)]
TICKETS = [numbered(0), numbered(1), numbered(2)]
Encode = Callable[..., list[pb.Ticket | ProducerError]]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between attempts, which take no time here."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(client, "asyncio", SimpleNamespace(sleep=sleep))
    return slept


@pytest.fixture(params=["Producer", "AsyncProducer"])
def encode(request: pytest.FixtureRequest, waits: list[float]) -> Encode:
    """`encode` of either client: the address, and its arguments."""

    def plainly(address: str, *arguments: Any, **options: Any) -> list[pb.Ticket | ProducerError]:
        producer = Producer(address)
        try:
            return producer.encode(*arguments, **options)
        finally:
            producer.close()

    async def asynchronously(address: str, *arguments: Any, **options: Any) -> list[pb.Ticket | ProducerError]:
        producer = AsyncProducer(address)
        try:
            return await producer.encode(*arguments, **options)
        finally:
            await producer.close()

    if request.param == "Producer":
        return plainly
    return lambda *arguments, **options: asyncio.run(asynchronously(*arguments, **options))


def sent(script: ScriptedProducer) -> list[list[bytes]]:
    return [[item.data for item in request.items] for request in script.requests]


def test_what_had_no_room_is_sent_again(
    producer: Producer, script: ScriptedProducer, encode: Encode, waits: list[float]
) -> None:
    play(script, answer(FULL, TICKETS[1], DOWN), answer(TICKETS[0], FULL), answer(TICKETS[2]))
    assert encode(producer.address, FILES, BOUND_S) == TICKETS
    assert sent(script) == [[b"0", b"1", b"2"], [b"0", b"2"], [b"2"]]
    assert len(waits) == 2
    assert min(waits) >= 0.3


@pytest.mark.parametrize("code", [FULL, DOWN])
def test_a_call_that_was_turned_away_is_made_again(
    producer: Producer, script: ScriptedProducer, encode: Encode, code: grpc.StatusCode
) -> None:
    play(script, refuse(code), answer(*TICKETS))
    assert encode(producer.address, FILES, BOUND_S) == TICKETS
    assert sent(script) == [[b"0", b"1", b"2"]] * 2


def test_an_overload_that_stays_is_told(producer: Producer, script: ScriptedProducer, encode: Encode) -> None:
    play(script, answer(TICKETS[0], FULL), answer(FULL))
    first, second = encode(producer.address, FILES[:2], BOUND_S)
    assert first == TICKETS[0]
    assert isinstance(second, ProducerError)
    assert (second.code, second.reason, str(second), second.retry_delay_s) == (FULL, "QUEUE_FULL", "not now", 0.3)
    assert len(script.requests) == 3


@pytest.mark.parametrize("code", [FULL, DOWN])
def test_a_call_that_is_always_turned_away(
    producer: Producer, script: ScriptedProducer, encode: Encode, code: grpc.StatusCode
) -> None:
    play(script, refuse(code))
    with pytest.raises(ProducerError, match="not now") as failed:
        encode(producer.address, FILES, BOUND_S)
    assert failed.value.code is code
    assert len(script.requests) == 3


def test_what_grpc_finds_too_large_is_not_sent_again(
    encode: Encode, script: ScriptedProducer, waits: list[float]
) -> None:
    """By the server's own limit of a message; nobody else says RESOURCE_EXHAUSTED without a reason."""
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.max_receive_message_length", 1000)])
    add_EncoderCacheServicer_to_server(script, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with pytest.raises(ProducerError) as failed:
        encode(address, [pb.MediaItem(data=b"x" * 1001)], BOUND_S)
    server.stop(grace=None).wait(BOUND_S)
    assert (failed.value.code, failed.value.reason, failed.value.is_too_large) == (FULL, "", True)
    assert waits == []


FINAL = [
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
]


@pytest.mark.parametrize("code", FINAL)
def test_other_errors_are_not_tried_again(
    producer: Producer, script: ScriptedProducer, encode: Encode, waits: list[float], code: grpc.StatusCode
) -> None:
    play(script, answer(TICKETS[0], code))
    first, second = encode(producer.address, FILES[:2], BOUND_S)
    assert first == TICKETS[0]
    assert isinstance(second, ProducerError)
    assert second.code is code
    play(script, refuse(code))
    with pytest.raises(ProducerError):
        encode(producer.address, FILES, BOUND_S)
    assert len(script.requests) == 2
    assert waits == []


def test_a_producer_that_falls_silent_costs_no_other_items_ticket(
    producer: Producer, script: ScriptedProducer, encode: Encode
) -> None:
    script.hang("Encode")
    play(script, answer(TICKETS[0], FULL, TICKETS[2]), script.answers["Encode"])
    first, second, third = encode(producer.address, FILES, 1.0)
    assert [first, third] == [TICKETS[0], TICKETS[2]]
    assert isinstance(second, ProducerError)
    assert second.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_one_deadline_for_all_attempts(
    producer: Producer, script: ScriptedProducer, encode: Encode, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer is told with each what is left of it, roughly."""

    def refuse_late(context: grpc.ServicerContext) -> Any:
        clock.now_s += BOUND_S / 4
        context.abort(DOWN, "not now")

    monkeypatch.setattr(client, "Attempts", functools.partial(retries.Attempts, clock=clock))
    allowed_s = play(script, refuse_late)
    with pytest.raises(ProducerError):
        encode(producer.address, FILES, BOUND_S)
    assert allowed_s == sorted(allowed_s, reverse=True)
    assert allowed_s[0] - allowed_s[2] > BOUND_S / 4


@pytest.mark.parametrize("timeout_s", [0.01, 0.2, 0.4, BOUND_S])
def test_a_producer_that_is_down_is_not_waited_for_beyond_the_deadline(
    absent: Producer, encode: Encode, waits: list[float], timeout_s: float
) -> None:
    with pytest.raises(ProducerError) as failed:
        encode(absent.address, FILES, timeout_s)
    assert failed.value.code in (DOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert len(waits) < 3
    assert all(seconds < timeout_s for seconds in waits)
    if timeout_s < 2 * retries._FIRST_DELAY_S:
        assert waits == []
    if timeout_s == BOUND_S:
        assert len(waits) == 2


def test_a_producer_that_has_come_up_serves_the_next_encode(script: ScriptedProducer) -> None:
    """However often it could not be reached before. Several of them, as it is a matter of chance when they connect."""
    script.answers["Encode"] = answer(TICKET)
    ports = [free_port() for _ in range(4)]
    producers = [Producer(f"127.0.0.1:{port}") for port in ports]
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        for producer in producers:
            with pytest.raises(ProducerError, match="failed to connect"):
                producer.info(BOUND_S)
        time.sleep(0.05)
    for port, producer in zip(ports, producers, strict=True):
        with serving(script, port):
            assert producer.encode([ITEM], BOUND_S) == [TICKET]
        producer.close()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, {}),
        ({}, {}),
        (
            {"mm_processor_kwargs": None, "media_io_kwargs": {"video": {"num_frames": 4}}},
            {"mm_processor_kwargs": "{}", "media_io_kwargs": '{"video": {"num_frames": 4}}'},
        ),
    ],
)
def test_settings_go_with_every_attempt(
    producer: Producer, script: ScriptedProducer, encode: Encode, settings: Any, expected: dict[str, str]
) -> None:
    play(script, answer(FULL), answer(TICKETS[0]))
    assert encode(producer.address, FILES[:1], BOUND_S, settings=settings) == TICKETS[:1]
    assert [dict(request.settings) for request in script.requests] == [expected] * 2


@pytest.mark.parametrize("num", [0, 1, 3])
def test_an_answer_of_another_length(producer: Producer, script: ScriptedProducer, encode: Encode, num: int) -> None:
    play(script, answer(*TICKETS[:num]))
    with pytest.raises(ProducerError, match=f"answered for {num} of 2 items") as failed:
        encode(producer.address, FILES[:2], BOUND_S)
    assert failed.value.code is grpc.StatusCode.INTERNAL
    assert len(script.requests) == 1


# Counts


def encodes(code: str) -> float:
    return total(REGISTRY, "shim_encodes_total", code=code)


def test_each_call_is_counted_by_its_end(script: ScriptedProducer, producer: Producer) -> None:
    ok, refused, seconds = encodes("OK"), encodes("FAILED_PRECONDITION"), total(REGISTRY, "shim_encode_seconds_count")
    producer.encode([ITEM] * 3, BOUND_S)
    script.refuse("Encode", code=grpc.StatusCode.FAILED_PRECONDITION, reason="FINGERPRINT_MISMATCH", message="no")
    with pytest.raises(ProducerError):
        producer.encode([ITEM], BOUND_S)
    assert (encodes("OK"), encodes("FAILED_PRECONDITION")) == (ok + 1, refused + 1)
    assert total(REGISTRY, "shim_encode_seconds_count") == seconds + 2


async def test_a_call_that_is_cancelled_is_counted(script: ScriptedProducer, producer: Producer) -> None:
    script.hang("Encode")
    before, client = encodes("CANCELLED"), AsyncProducer(producer.address)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(client.encode([ITEM], BOUND_S), 0.2)
    await client.close()
    assert encodes("CANCELLED") == before + 1
