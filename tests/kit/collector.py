"""A collector of OpenTelemetry's, in this process: takes spans over OTLP on a port of its own and keeps them."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from typing_extensions import Self

WAIT_S = 30.0
"""Longer than spans take to arrive: reaching it means that they never come."""


@dataclass(frozen=True, slots=True)
class SpanSeen:
    """A span as it arrived; ids in hex, attributes without the project's prefix."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    failed: bool
    start_ns: int
    end_ns: int


class Collector(service.TraceServiceServicer):
    """As a context manager, up inside it. `address` is host:port."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[SpanSeen] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        service.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(0).wait()

    def Export(self, request: Any, context: Any) -> Any:
        seen = [
            _seen(span, _value(resource.resource.attributes, "service.name"))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += seen
        return messages.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[SpanSeen]:
        """All that came so far."""
        with self._lock:
            return list(self._spans)

    def trace(self, trace_id: str, until: Callable[[Sequence[SpanSeen]], object]) -> list[SpanSeen]:
        """The spans of a trace by their start, once they are what is waited for."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            found = sorted((one for one in self.spans if one.trace_id == trace_id), key=lambda one: one.start_ns)
            if until(found):
                return found
            assert time.monotonic() < deadline_s, [(one.service, one.name, one.parent_id) for one in found]
            time.sleep(0.05)


def named(spans: Sequence[SpanSeen], name: str) -> SpanSeen:
    """The one span of that name."""
    (found,) = [one for one in spans if one.name == name]
    return found


def _seen(span: Any, service: str) -> SpanSeen:
    return SpanSeen(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes={one.key.removeprefix("ec_producer."): _plain(one.value) for one in span.attributes},
        failed=span.status.code == 2,  # STATUS_CODE_ERROR
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
    )


def _value(attributes: Any, key: str) -> str:
    return str(next((_plain(one.value) for one in attributes if one.key == key), ""))


def _plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
