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
    (status(info("QUEUE_FULL"), retry(-1)), "QUEUE_FULL", 0.0),
    (status(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="proxy.example"), retry(1)), "", 1.0),
    (status(error_details_pb2.ErrorInfo(reason="LIMIT", domain="proxy.example"), info("POOL_FULL")), "POOL_FULL", 0.0),
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


def test_a_call_that_the_producer_cancelled() -> None:
    call = FailedCall((), None)
    call.code = lambda: grpc.StatusCode.CANCELLED
    assert described(ProducerError.from_call(call)) == (grpc.StatusCode.UNAVAILABLE, "", "CANCELLED", 0.0)


def test_an_unknown_code() -> None:
    assert ProducerError.from_status(status(code=999)).code is grpc.StatusCode.UNKNOWN


def test_details_that_are_garbage() -> None:
    """Whoever is on the way may write there."""
    assert described(ProducerError.from_call(FailedCall((("grpc-status-details-bin", b"\xff\xff"),)))) == (
        *(FULL, "", "the queue is full", 0.0),
    )
    found = status(info("QUEUE_FULL"))
    found.details[0].value = b"\xff\xff"
    assert described(ProducerError.from_status(found)) == (FULL, "", "the queue is full", 0.0)


# What may come of asking again

UNAVAILABLE, LATE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
TOO_LARGE: dict[str, bool] = {"is_too_large": True}
KINDS: list[tuple[grpc.StatusCode, str, dict[str, bool]]] = [
    (UNAVAILABLE, "", {"is_retryable": True, "is_down": True, "is_for_others": True}),
    (UNAVAILABLE, "SHUTTING_DOWN", {"is_retryable": True, "is_down": True, "is_for_others": True}),
    (UNAVAILABLE, "DEVICE_LOST", {"is_down": True, "is_for_others": True}),
    (UNAVAILABLE, "TRANSPORT_DOWN", {"is_retryable": True, "is_for_others": True}),
    (UNAVAILABLE, "SOMETHING_NEW", {"is_for_others": True}),
    (FULL, "QUEUE_FULL", {"is_retryable": True, "is_for_others": True}),
    (FULL, "CLIENT_LIMIT", {"is_retryable": True, "is_for_others": True}),
    (FULL, "TOO_MANY_STREAMS", {"is_retryable": True, "is_for_others": True}),
    (FULL, "", TOO_LARGE),
    (FULL, "SOMETHING_NEW", {}),
    (LATE, "", {"is_silence": True, "is_for_others": True}),
    (LATE, "DEADLINE_UNMEETABLE", {"is_for_others": True}),
    (LATE, "DEADLINE_EXCEEDED", {"is_silence": True, "is_for_others": True}),
    (grpc.StatusCode.INTERNAL, "WORKER_DIED", {}),
    (grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_UNREADABLE", {}),
    (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", {}),
    (grpc.StatusCode.CANCELLED, "", {}),
]


@pytest.mark.parametrize(("code", "reason", "expected"), KINDS)
def test_kinds(code: grpc.StatusCode, reason: str, expected: dict[str, bool]) -> None:
    names = ("is_retryable", "is_down", "is_silence", "is_for_others", "is_too_large")
    error = ProducerError(code, reason, "why")
    assert {name: getattr(error, name) for name in names} == dict.fromkeys(names, False) | expected
