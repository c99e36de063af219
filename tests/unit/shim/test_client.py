"""Calls to a producer, over real gRPC on loopback."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from consumer_shim.client import Lease, Producer, ProducerError
from producer.transport.base import BlockDescriptor
from producer.wire.block import BlockError, BlockIdentity, EmbeddingShape, write_block
from producer.wire.contract import ERROR_DOMAIN, WIRE_VERSION
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheServicer, add_EncoderCacheServicer_to_server
from tests.kit.ports import free_port

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


def status(code: grpc.StatusCode, reason: str, message: str) -> status_pb2.Status:
    found = status_pb2.Status(code=code.value[0], message=message)
    found.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN))
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


@pytest.fixture
def producer(script: ScriptedProducer) -> Iterator[Producer]:
    server = grpc.server(ThreadPoolExecutor(4))
    add_EncoderCacheServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    producer = Producer(f"127.0.0.1:{port}")
    yield producer
    producer.close()
    server.stop(grace=None).wait(BOUND_S)


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
    assert script.requests == [pb.EncodeRequest(items=[ITEM, ITEM, ITEM])]
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
