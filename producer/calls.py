"""What each gRPC call leaves behind: a count, its request's id in the trailing metadata, a line in the log, a span.

A call that fails, or has an item that does, is worth a line at info; one in which all went well, at debug. The reason
is in it, not the sentence for the client, which may quote what the client sent.
"""

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from time import monotonic, perf_counter
from typing import Any

import grpc

from producer import call_notes
from producer.call_notes import CallNotes
from producer.metrics import METHODS, OTHER, Metrics
from producer.security import client_of
from producer.wire.contract import SERVICE_NAME
from producer.wire.origin import REQUEST_ID_HEADER, Origin, set_current
from producer.wire.tracing import Span, Tracing

logger = logging.getLogger(__name__)

_NAMES = {f"/{SERVICE_NAME}/{name}": name for name in METHODS if name != OTHER}
_CODES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
_OK = grpc.StatusCode.OK.name
_MOST_HANDLERS = 64


class CallRecorder(grpc.aio.ServerInterceptor):
    """The first interceptor, so that it records what the others refuse. For the event loop.

    Health checks, reflection and methods that do not exist are counted under one name, and leave nothing else.
    """

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._requests = functools.cache(lambda method, code: metrics.requests.labels(method, code))
        self._tracing = tracing
        self._recorded: dict[tuple[str, int], tuple[Any, Any]] = {}  # a handler as it was, and as it is recorded

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        details: Any = handler_call_details
        name = _NAMES.get(details.method, OTHER)
        if handler is None:
            self._requests(name, grpc.StatusCode.UNIMPLEMENTED.name).inc()
            return None
        found = self._recorded.get((name, id(handler)))
        if found is None:
            found = handler, self._record(name, handler)
            if len(self._recorded) < _MOST_HANDLERS:
                self._recorded[name, id(handler)] = found  # with the handler, or its id could become another's
        return found[1]

    def _record(self, name: str, handler: Any) -> Any:
        streams = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if does else "unary" for does in streams)
        behaviour = getattr(handler, kind)
        wrap = self._generator if inspect.isasyncgenfunction(behaviour) else self._coroutine
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrap(name, behaviour), handler.request_deserializer, handler.response_serializer)

    def _coroutine(self, name: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            begun = self._begin(name, context)
            try:
                response = await behaviour(request, context)
            except BaseException as error:
                self._end(begun, context, error)
                raise
            self._end(begun, context, None)
            return response

        return call

    def _generator(self, name: str, behaviour: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            begun = self._begin(name, context)
            try:
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response
            except BaseException as error:
                self._end(begun, context, error)
                raise
            self._end(begun, context, None)

        return call

    def _begin(self, name: str, context: Any) -> "_Call":
        """The call has its metadata. It has a task of its own, so that what is set here stays within."""
        left_s = context.time_remaining()
        call = _Call(name, math.inf if left_s is None else monotonic() + left_s)
        if name != OTHER:
            call.open(context, self._tracing)
        return call

    def _end(self, call: "_Call", context: Any, error: BaseException | None) -> None:
        """The call is over.

        A stream that its client left ends when its generator is collected. Nothing may be asked of the context then:
        gRPC has freed what it is about, and asking ends the process.
        """
        code = code_of(error, context, call.deadline_s)
        self._requests(call.name, code).inc()
        call.end(code)


class _Call:
    """A call under way: its notes, and its span where it is traced; neither where it was not opened."""

    __slots__ = ("_client", "_notes", "_since_s", "_span", "_tracing", "deadline_s", "name")

    def __init__(self, name: str, deadline_s: float) -> None:
        """It is to end by `deadline_s` (time.monotonic)."""
        self.name = name
        self.deadline_s = deadline_s
        self._notes: CallNotes | None = None

    def open(self, context: Any, tracing: Tracing | None) -> None:
        """Gives it an id, which the client gets, and begins what is noted of it."""
        self._client = client_of(context)
        self._tracing = tracing
        self._span: Span | None = None
        origin = Origin.from_headers(context.invocation_metadata() or ()).named()
        context.set_trailing_metadata(((REQUEST_ID_HEADER, origin.request_id),))
        set_current(origin)
        if tracing is not None:
            self._span = tracing.begin(self.name, kind="server")
            set_current(self._span.origin)
        self._notes = call_notes.begin()
        self._since_s = perf_counter()

    def end(self, code: str) -> None:
        """Its line, and the end of its span."""
        if self._notes is None:
            return
        self._log(code, self._notes)
        if self._span is not None and self._tracing is not None:
            _finish(self._span, code, self._notes)
            self._tracing.end(self._span)

    def _log(self, code: str, notes: CallNotes) -> None:
        is_fine = code == _OK and notes.outcomes.keys() <= {_OK}
        level = logging.DEBUG if is_fine else logging.INFO
        if not logger.isEnabledFor(level):
            return
        seconds = round(perf_counter() - self._since_s, 4)
        fields: dict[str, Any] = {"method": self.name, "code": code, **notes.fields, "seconds": seconds}
        if notes.outcomes:
            fields["items"] = ", ".join(f"{count} {outcome}" for outcome, count in sorted(notes.outcomes.items()))
        fields["client"] = self._client
        logger.log(level, "%s ended with %s", self.name, code, extra={"fields": fields})


def _finish(span: Span, code: str, notes: CallNotes) -> None:
    if code == _OK:
        span.set(code=code, **notes.fields)
    else:
        span.fail(code=code, **notes.fields)


def code_of(error: BaseException | None, context: Any, deadline_s: float) -> str:
    """The name of the status that a call has ended with, whose deadline was `deadline_s` (time.monotonic)."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        is_late = monotonic() >= deadline_s
        return (grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED).name
    code = context.code()
    name = code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code or 0)
    if error is not None and name in (None, grpc.StatusCode.OK.name):
        return grpc.StatusCode.UNKNOWN.name  # what gRPC makes of an exception
    return name or grpc.StatusCode.UNKNOWN.name
