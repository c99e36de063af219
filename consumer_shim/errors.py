"""What a producer answers instead of what was asked for, and what may come of asking again."""

from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from producer.wire.contract import ERROR_DOMAIN, Reason

_LATER = frozenset(
    {
        Reason.QUEUE_FULL,
        Reason.POOL_FULL,
        Reason.TOO_MANY_LEASES,
        Reason.TOO_MANY_STREAMS,
        Reason.CLIENT_LIMIT,
        Reason.SHUTTING_DOWN,
        Reason.TRANSPORT_DOWN,
    }
)
"""Reasons that pass: the same call may succeed a little later."""
_NO_WORK = ("", Reason.SHUTTING_DOWN, Reason.DEVICE_LOST)
"""Reasons of UNAVAILABLE that hold for whatever a producer is asked; "" is gRPC's own, that it was not reached."""


class ProducerError(Exception):
    """A producer refused or failed.

    `code` is the gRPC status, `reason` the stable one of `google.rpc.ErrorInfo` ("" where the producer gave none, as
    when gRPC itself ended the call), `retry_delay_s` the seconds that the producer asks to be left alone for.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, retry_delay_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_delay_s = retry_delay_s

    @property
    def is_retryable(self) -> bool:
        """Whether the same producer may do it later. What gRPC found too large (RESOURCE_EXHAUSTED) stays so."""
        return self.reason in _LATER or (self.code is grpc.StatusCode.UNAVAILABLE and not self.reason)

    @property
    def is_down(self) -> bool:
        """Whether the producer was not reached, or takes no work at all."""
        return self.code is grpc.StatusCode.UNAVAILABLE and self.reason in _NO_WORK

    @property
    def is_silence(self) -> bool:
        """Whether the time ended, and nothing had come of the call."""
        return self.code is grpc.StatusCode.DEADLINE_EXCEEDED and self.reason in ("", Reason.DEADLINE_EXCEEDED)

    @property
    def is_for_others(self) -> bool:
        """Whether another producer may do it now."""
        is_here_only = self.code is grpc.StatusCode.UNAVAILABLE or self.reason == Reason.DEADLINE_UNMEETABLE
        return self.is_retryable or is_here_only or self.is_silence

    @property
    def is_too_large(self) -> bool:
        """Whether gRPC refused the message for its size."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not self.reason

    @classmethod
    def from_status(cls, status: status_pb2.Status) -> "ProducerError":
        """The error of one item."""
        code = next((code for code in grpc.StatusCode if code.value[0] == status.code), grpc.StatusCode.UNKNOWN)
        return cls(code, _reason(status), status.message, _retry_delay_s(status))

    @classmethod
    def from_call(cls, error: grpc.RpcError) -> "ProducerError":
        """The error of a whole call. One that the producer cancelled (it stops) is as one that did not reach it."""
        metadata: Any = error.trailing_metadata() or ()
        try:
            status = status_pb2.Status.FromString(dict(metadata).get("grpc-status-details-bin", b""))
        except DecodeError:  # then whatever is on the way wrote it
            status = status_pb2.Status()
        code = grpc.StatusCode.UNAVAILABLE if error.code() is grpc.StatusCode.CANCELLED else error.code()
        return cls(code, _reason(status), error.details() or error.code().name, _retry_delay_s(status))


def _reason(status: status_pb2.Status) -> str:
    """The producer's own; what a proxy says about itself is none."""
    infos = (_unpacked(detail, error_details_pb2.ErrorInfo()) for detail in status.details)
    return next((info.reason for info in infos if info is not None and info.domain == ERROR_DOMAIN), "")


def _retry_delay_s(status: status_pb2.Status) -> float:
    infos = (_unpacked(detail, error_details_pb2.RetryInfo()) for detail in status.details)
    delay = next((info.retry_delay for info in infos if info is not None), None)
    return 0.0 if delay is None else max(0.0, delay.seconds + delay.nanos / 1e9)


def _unpacked(detail: Any, message: Any) -> Any:
    try:
        return message if detail.Unpack(message) else None
    except DecodeError:
        return None
