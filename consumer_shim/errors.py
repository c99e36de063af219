"""What a producer answers instead of what was asked for."""

from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2


class ProducerError(Exception):
    """A producer refused or failed.

    `code` is the gRPC status, `reason` the stable one of `google.rpc.ErrorInfo`, `retry_delay_s` the seconds that the
    producer asks to be left alone for.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, retry_delay_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_delay_s = retry_delay_s

    @classmethod
    def from_status(cls, status: status_pb2.Status) -> "ProducerError":
        """The error of one item."""
        code = next((code for code in grpc.StatusCode if code.value[0] == status.code), grpc.StatusCode.UNKNOWN)
        return cls(code, _reason(status), status.message, _retry_delay_s(status))

    @classmethod
    def from_call(cls, error: grpc.RpcError) -> "ProducerError":
        """The error of a whole call."""
        metadata: Any = error.trailing_metadata() or ()
        details = dict(metadata).get("grpc-status-details-bin", b"")
        status = status_pb2.Status.FromString(details)
        return cls(error.code(), _reason(status), error.details() or error.code().name, _retry_delay_s(status))


def _reason(status: status_pb2.Status) -> str:
    info = error_details_pb2.ErrorInfo()
    return next((info.reason for detail in status.details if detail.Unpack(info)), "")


def _retry_delay_s(status: status_pb2.Status) -> float:
    info = error_details_pb2.RetryInfo()
    delays = (info.retry_delay.ToTimedelta() for detail in status.details if detail.Unpack(info))
    return next((delay.total_seconds() for delay in delays), 0.0)
