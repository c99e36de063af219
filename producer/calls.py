"""What each gRPC call leaves behind: its request's id in the trailing metadata, a line in the log, a span.

A call that fails, or has an item that does, is worth a line at info; one in which all went well, at debug. The reason
is in it, not the sentence for the client, which may quote what the client sent.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from time import perf_counter
from typing import Any

import grpc

from producer import call_notes
from producer.call_notes import CallNotes
from producer.request_counter import code_of
from producer.security import client_of
from producer.wire.contract import SERVICE_NAME
from producer.wire.origin import REQUEST_ID_HEADER, Origin, set_current
from producer.wire.tracing import Span, Tracing

logger = logging.getLogger(__name__)

_OURS = f"/{SERVICE_NAME}/"
_OK = grpc.StatusCode.OK.name
_MOST_HANDLERS = 64


class CallRecorder(grpc.aio.ServerInterceptor):
    """Goes before the interceptors whose refusals are to be recorded. Health checks and reflection leave no trace."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self._recorded: dict[tuple[str, int], tuple[Any, Any]] = {}  # a handler as it was, and as it is recorded

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        details: Any = handler_call_details
        if handler is None or not details.method.startswith(_OURS):
            return handler
        key = details.method, id(handler)
        if key not in self._recorded:
            made = self._record(details.method.removeprefix(_OURS), handler)
            if len(self._recorded) >= _MOST_HANDLERS:
                return made
            self._recorded[key] = handler, made  # kept, or its id could become another's
        return self._recorded[key][1]

    def _record(self, name: str, handler: Any) -> Any:
        streams = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if does else "unary" for does in streams)
        behaviour = getattr(handler, kind)
        wrap = self._generator if inspect.isasyncgenfunction(behaviour) else self._coroutine
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrap(name, behaviour), handler.request_deserializer, handler.response_serializer)

    def _coroutine(self, name: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            with self._recording(name, context):
                return await behaviour(request, context)

        return call

    def _generator(self, name: str, behaviour: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._recording(name, context):
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response

        return call

    @contextmanager
    def _recording(self, name: str, context: Any) -> Iterator[None]:
        """The call, from its metadata to its end. It has a task of its own, so that what is set here stays within."""
        origin = Origin.from_headers(context.invocation_metadata() or ()).named()
        context.set_trailing_metadata(((REQUEST_ID_HEADER, origin.request_id),))
        set_current(origin)
        span = self._tracing.begin(name, kind="server") if self._tracing is not None else None
        if span is not None:
            set_current(span.origin)
        notes = call_notes.begin()
        since_s = perf_counter()
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            code = code_of(error, context)
            _log(name, code, notes, perf_counter() - since_s, context)
            if span is not None and self._tracing is not None:
                _finish(span, code, notes)
                self._tracing.end(span)


def _log(name: str, code: str, notes: CallNotes, seconds: float, context: Any) -> None:
    is_fine = code == _OK and notes.outcomes.keys() <= {_OK}
    level = logging.DEBUG if is_fine else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {"method": name, "code": code, **notes.fields, "seconds": round(seconds, 4)}
    if notes.outcomes:
        fields["items"] = ", ".join(f"{count} {outcome}" for outcome, count in sorted(notes.outcomes.items()))
    fields["client"] = client_of(context)
    logger.log(level, "%s ended with %s", name, code, extra={"fields": fields})


def _finish(span: Span, code: str, notes: CallNotes) -> None:
    if code == _OK:
        span.set(code=code, **notes.fields)
    else:
        span.fail(code=code, **notes.fields)
