"""What a producer's errors say, from an item's status and from a call's trailing metadata."""

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from consumer_shim.errors import ProducerError
from producer.wire.contract import ERROR_DOMAIN

FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


def status(*details: Any, code: int = FULL.value[0]) -> status_pb2.Status:
    found = status_pb2.Status(code=code, message="the queue is full")
    for detail in details:
        found.details.add().Pack(detail)
    return found


def info(reason: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN)


def retry(seconds: int, nanos: int = 0) -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos))


class FailedCall(grpc.RpcError):
    """As gRPC raises it, as far as it is looked at."""

    def __init__(self, metadata: Any, details: str | None = "the queue is full") -> None:
        self.trailing_metadata = lambda: metadata
        self.details = lambda: details
        self.code = lambda: FULL


def described(error: ProducerError) -> tuple[object, ...]:
    return error.code, error.reason, str(error), error.retry_delay_s


CASES: list[tuple[status_pb2.Status, str, float]] = [
    (status(info("QUEUE_FULL"), retry(1, 500_000_000)), "QUEUE_FULL", 1.5),
    (status(retry(2), info("QUEUE_FULL")), "QUEUE_FULL", 2.0),
    (status(info("QUEUE_FULL")), "QUEUE_FULL", 0.0),
    (status(retry(0, 1_000_000)), "", 0.001),
    (status(error_details_pb2.DebugInfo(detail="x")), "", 0.0),
    (status(), "", 0.0),
]


@pytest.mark.parametrize(("found", "reason", "delay_s"), CASES)
def test_an_items_error(found: status_pb2.Status, reason: str, delay_s: float) -> None:
    assert described(ProducerError.from_status(found)) == (FULL, reason, "the queue is full", delay_s)


@pytest.mark.parametrize(("found", "reason", "delay_s"), CASES)
def test_a_calls_error(found: status_pb2.Status, reason: str, delay_s: float) -> None:
    call = FailedCall((("other", "x"), ("grpc-status-details-bin", found.SerializeToString())))
    assert described(ProducerError.from_call(call)) == (FULL, reason, "the queue is full", delay_s)


@pytest.mark.parametrize("metadata", [None, (), (("other", b"x"),)])
def test_a_call_without_details(metadata: Any) -> None:
    assert described(ProducerError.from_call(FailedCall(metadata))) == (FULL, "", "the queue is full", 0.0)


def test_a_call_without_words() -> None:
    assert str(ProducerError.from_call(FailedCall((), None))) == "RESOURCE_EXHAUSTED"


def test_an_unknown_code() -> None:
    assert ProducerError.from_status(status(code=999)).code is grpc.StatusCode.UNKNOWN
