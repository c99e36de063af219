"""Whom a piece of work is for: a request's id and its W3C trace context, as text that travels everywhere.

It goes along in gRPC metadata, HTTP headers and `ec_transfer_params`; within a process a context variable has it. What
comes from outside is taken only where it is sane: whatever is here may stand in a log line as it is.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from producer.wire.random_ids import random_id

REQUEST_ID_HEADER = "x-request-id"
ORIGIN_PARAM = "ec_producer_origin"
"""Field of a request's `ec_transfer_params` that says whom its pulls are for."""

_SANE = {
    "request_id": re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}"),
    "traceparent": re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile(r"[\x20-\x7e]{1,512}"),
}
_FIELDS = {REQUEST_ID_HEADER: "request_id", "traceparent": "traceparent", "tracestate": "tracestate"}


@dataclass(frozen=True, slots=True)
class Origin:
    """A request's id of at most 128 characters, and its trace context as W3C writes it; "" for what is not known."""

    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hex digits; "" without a trace."""
        return self.traceparent[3:35]

    @property
    def is_sampled(self) -> bool:
        """Whether who began the trace wants its spans."""
        return bool(self.traceparent) and bool(int(self.traceparent[-2:], 16) & 1)

    def named(self) -> "Origin":
        """Itself, with an id made here where it has none."""
        return self if self.request_id else Origin(random_id(), self.traceparent, self.tracestate)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What a call for this request carries: gRPC metadata or HTTP headers."""
        return tuple((header, getattr(self, name)) for header, name in _FIELDS.items() if getattr(self, name))

    def to_params(self) -> dict[str, str]:
        """As JSON can hold it."""
        return dict(self.headers())

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[Any, Any]]) -> "Origin":
        """What headers say, text or bytes; of a name that comes twice the first counts, what is not sane does not."""
        found: dict[str, str] = {}
        for key, value in headers:
            name = _FIELDS.get(_text(key).lower())
            if name is not None and name not in found and _SANE[name].fullmatch(_text(value)):
                found[name] = _text(value)
        if "traceparent" not in found:
            found.pop("tracestate", None)
        return cls(**found)

    @classmethod
    def from_params(cls, params: Any) -> "Origin":
        """What `to_params` made, or as much of anything else as is sane."""
        return cls.from_headers(params.items()) if isinstance(params, Mapping) else NOBODY


NOBODY = Origin()
_current: ContextVar[Origin] = ContextVar("origin", default=NOBODY)


def current() -> Origin:
    """Whom what runs now is for."""
    return _current.get()


def set_current(origin: Origin) -> None:
    """For the rest of this task or thread, and the tasks that it begins."""
    _current.set(origin)


@contextmanager
def work_for(origin: Origin) -> Iterator[None]:
    """What the body does is for `origin`."""
    token = _current.set(origin)
    try:
        yield
    finally:
        _current.reset(token)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value if isinstance(value, str) else ""
