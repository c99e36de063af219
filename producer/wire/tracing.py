"""OpenTelemetry spans, sent over OTLP. The only module that imports OpenTelemetry, and only where tracing is on.

Who may trace has a `Tracing | None`, and asks once: without one, no span and nothing else is made. A span has only what
its caller gives it: names, numbers and the first 16 digits of a content key, never media, whole keys or secrets.
"""

import atexit
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal

from producer.wire import origin as origins
from producer.wire.origin import Origin

Kind = Literal["internal", "server", "client"]
Attribute = str | int | float | bool

_PREFIX = "ec_producer."
_QUEUE_SPANS = 2048
_BATCH_SPANS = 512
_DELAY_MS = 1000
_EXPORT_TIMEOUT_S = 5
_CLOSE_S = 3.0
_ENDPOINT = re.compile(r"(https?://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}/?")
_NOTHING: "AbstractContextManager[None]" = nullcontext()


class TracingUnavailableError(Exception):
    """Tracing is asked for and cannot be had; the message says what is missing."""


def check_settings(endpoint: object, ratio: object) -> None:
    """ValueError for an endpoint that is neither "" nor one of OTLP over gRPC, or a ratio that is none."""
    if not isinstance(endpoint, str) or (endpoint and not _ENDPOINT.fullmatch(endpoint)):
        raise ValueError(
            f"otlp_traces_endpoint is {endpoint!r}; expected '' or host:port, http://host:port or https://host:port"
        )
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ValueError(f"trace_sample_ratio is {ratio!r}; allowed are 0 to 1")


class Span:
    """A part of a request's way. `origin` is for what is done within it. Any thread may call it."""

    __slots__ = ("_span", "origin")

    def __init__(self, span: Any, origin: Origin) -> None:
        self._span = span
        self.origin = origin

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes, under this project's prefix."""
        for name, value in attributes.items():
            self._span.set_attribute(_PREFIX + name, value)

    def fail(self, **attributes: Attribute) -> None:
        """As `set`, and marks the span as failed."""
        self.set(**attributes)
        self._span.set_status(_error_status())


class Tracing:
    """Makes this process's spans and sends them, off the caller's thread. At most 2048 wait; more are dropped."""

    def __init__(self, endpoint: str, ratio: float, service: str) -> None:
        """Sends to `endpoint` what a caller sampled, and `ratio` of the traces that begin here, as `service`.

        Raises:
            TracingUnavailableError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError as error:
            raise TracingUnavailableError(
                f"otlp_traces_endpoint is {endpoint!r} and OpenTelemetry is not installed ({error});"
                " pip install 'ec-producer[tracing]'"
            ) from None
        exporter = OTLPSpanExporter(
            endpoint=endpoint.rstrip("/"), insecure=not endpoint.startswith("https:"), timeout=_EXPORT_TIMEOUT_S
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create({"service.name": service}),
            id_generator=_id_generator(),
            shutdown_on_exit=False,  # it would wait for a collector that is down
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=_QUEUE_SPANS,
                max_export_batch_size=_BATCH_SPANS,
                schedule_delay_millis=_DELAY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("ec_producer")
        self._closing = threading.Lock()
        self._is_closed = False
        atexit.register(self.close)

    @contextmanager
    def span(self, name: str, *, kind: Kind = "internal", **attributes: Attribute) -> Iterator[Span]:
        """A span about the body, below the current origin's; the body's origin is the span."""
        span = self._start(name, origins.current(), kind, attributes, None)
        token = _span.set(span)
        try:
            with origins.work_for(span.origin):
                yield span
        except BaseException as error:
            span.fail(error=type(error).__name__)
            raise
        finally:
            _span.reset(token)
            self.end(span)

    def begin(
        self, name: str, *, kind: Kind = "internal", start_ns: int | None = None, **attributes: Attribute
    ) -> Span:
        """A span below the current origin's, from now or `start_ns` on; `end` must end it, or it is never sent."""
        return self._start(name, origins.current(), kind, attributes, start_ns)

    def end(self, span: Span) -> None:
        """The span is over."""
        span._span.end()

    def record(
        self,
        name: str,
        origin: Origin,
        start_ns: int,
        end_ns: int,
        *,
        failed: bool = False,
        **attributes: Attribute,
    ) -> None:
        """A span that is over, below `origin`'s, if that is sampled; times are `time.time_ns`."""
        if not origin.is_sampled:
            return
        span = self._start(name, origin, "internal", attributes, start_ns)
        if failed:
            span.fail()
        span._span.end(end_ns)

    def close(self) -> None:
        """Sends what waits, for 3 s at most, and ends. Calls after the first do nothing."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        ending = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)

    def _start(
        self, name: str, origin: Origin, kind: Kind, attributes: dict[str, Attribute], start_ns: int | None
    ) -> Span:
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            name,
            _context(origin),
            SpanKind[kind.upper()],
            {_PREFIX + key: value for key, value in attributes.items()},
            start_time=start_ns,
        )
        return Span(span, _origin_of(span, origin))


_span: ContextVar[Span | None] = ContextVar("span", default=None)


def start(endpoint: str, ratio: float, service: str) -> Tracing | None:
    """As `Tracing`; None where `endpoint` is ""."""
    return Tracing(endpoint, ratio, service) if endpoint else None


def span(
    tracing: Tracing | None, name: str, *, kind: Kind = "internal", **attributes: Attribute
) -> "AbstractContextManager[Span | None]":
    """As `Tracing.span`; nothing where tracing is off."""
    return _NOTHING if tracing is None else tracing.span(name, kind=kind, **attributes)


def annotate(**attributes: Attribute) -> None:
    """Adds attributes to the span that this runs in, if there is one."""
    current = _span.get()
    if current is not None:
        current.set(**attributes)


def from_perf_counter(seconds: float) -> int:
    """A moment of `time.perf_counter` on the clock of spans."""
    return time.time_ns() - round((time.perf_counter() - seconds) * 1e9)


def _id_generator() -> Any:
    """Ids of the system's randomness: vLLM seeds Python's, so that all its servers would give the same ones."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class IdGenerator(RandomIdGenerator):
        def generate_span_id(self) -> int:
            return secrets.randbits(64) or 1

        def generate_trace_id(self) -> int:
            return secrets.randbits(128) or 1

    return IdGenerator()


def _context(origin: Origin) -> Any:
    """OpenTelemetry's view of an origin: what a span below it has for a parent."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    if not origin.traceparent:
        return Context()
    _, trace_id, span_id, flags = origin.traceparent.split("-")
    parent = SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=TraceState.from_header([origin.tracestate]) if origin.tracestate else TraceState(),
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _origin_of(span: Any, origin: Origin) -> Origin:
    found = span.get_span_context()
    if not found.is_valid:  # OTEL_SDK_DISABLED
        return origin
    return replace(origin, traceparent=f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags & 1:02x}")


def _error_status() -> Any:
    from opentelemetry.trace import Status, StatusCode

    return Status(StatusCode.ERROR)
