"""Every error that an item can end in, and what a client is told.

ServiceError
├── InvalidItemError      the item is at fault; it will fail again
├── InvalidRequestError   the request is at fault
├── MismatchError         client and producer do not fit together: version, fingerprint, epoch
├── NotFoundError         what was asked for has gone
├── OverloadedError       no room now; later there may be
├── DeadlineError         it cannot be done, or was not done, in the time that the client gave
├── AuthenticationError   the caller does not show who it is
├── UnavailableError      the service cannot take work now
└── InternalError         our fault

ValueError
└── UnsupportedModelError the model cannot be served; raised at start only
    └── MemoryPlanError   it does not fit into the device's memory
"""

import re

import grpc

from producer.wire.contract import Reason


class ServiceError(Exception):
    """Base of all; carries a stable reason beside the sentence for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvalidItemError(ServiceError):
    """The media item cannot be encoded, whoever asks."""


class InvalidRequestError(ServiceError):
    """The request is malformed or over a limit; `field` is the one at fault."""

    def __init__(self, reason: Reason, message: str, *, field: str = "items") -> None:
        super().__init__(reason, message)
        self.field = field


class MismatchError(ServiceError):
    """Client and producer differ in version, fingerprint or epoch."""


class NotFoundError(ServiceError):
    """The embedding or lease does not exist any more."""


class OverloadedError(ServiceError):
    """A queue or the pool is full; `retry_s` is when to come back."""

    def __init__(self, reason: Reason, message: str, *, retry_s: float = 0.1) -> None:
        super().__init__(reason, message)
        self.retry_s = retry_s


class DeadlineError(ServiceError):
    """The item cannot be, or was not, encoded before its deadline."""


class AuthenticationError(ServiceError):
    """The call carries no token that is known."""


class UnavailableError(ServiceError):
    """The service is starting, stopping, or has lost a part that the call needs."""


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message names it and why."""


class MemoryPlanError(UnsupportedModelError):
    """The encoder does not fit into the device's memory; the message has the numbers."""


class InternalError(ServiceError):
    """Something failed here that the item is not known to be at fault for."""


STATUS_CODES: dict[type[ServiceError], grpc.StatusCode] = {
    InvalidItemError: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    MismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    InternalError: grpc.StatusCode.INTERNAL,
}
"""The one table from error to gRPC status."""

_COUNT = re.compile(r"\d+ validation errors? for \w+")


def first_sentence(error: BaseException) -> str:
    """What an error of a library says on its first line that says something: pydantic's only counts what follows."""
    told = error.__cause__ if _COUNT.search(str(error)) and error.__cause__ else error
    lines = [line.strip() for line in str(told).splitlines() if line.strip() and not _COUNT.match(line)]
    place = next((place for place, line in enumerate(lines) if " " in line), 0)
    said = (lines or [type(error).__name__])[place].partition(" [type=")[0].removeprefix("Value error, ")
    return ": ".join([*lines[:place][-1:], said])[:1000]  # what stands before it is the field
