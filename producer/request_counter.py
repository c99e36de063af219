"""Counts every call that ends, by method and status, before anything else sees it."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from producer.metrics import METHODS, OTHER, Metrics
from producer.wire.contract import SERVICE_NAME

_NAMES = {f"/{SERVICE_NAME}/{name}": name for name in METHODS if name != OTHER}
_CODES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
_MOST_HANDLERS = 64


class RequestCounter(grpc.aio.ServerInterceptor):
    """The first interceptor, so that it counts what the others refuse. For the event loop.

    Whatever a client calls a method, there is one name for all that are not of this service.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.requests
        self._counted: dict[tuple[str, int], tuple[Any, Any]] = {}  # a handler as it was, and as it counts

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        details: Any = handler_call_details
        name = _NAMES.get(details.method, OTHER)
        if handler is None:
            self._requests.labels(name, grpc.StatusCode.UNIMPLEMENTED.name).inc()
            return None
        key = name, id(handler)
        if key not in self._counted:
            if len(self._counted) >= _MOST_HANDLERS:
                return self._count(name, handler)
            self._counted[key] = handler, self._count(name, handler)  # kept, or its id could become another's
        return self._counted[key][1]

    def _count(self, name: str, handler: Any) -> Any:
        """The same handler, counted when a call of it ends."""
        kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
        behaviour = getattr(handler, kind)
        wrap = self._generator if inspect.isasyncgenfunction(behaviour) else self._coroutine
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrap(name, behaviour), handler.request_deserializer, handler.response_serializer)

    def _coroutine(self, name: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            error: BaseException | None = None
            try:
                return await behaviour(request, context)
            except BaseException as raised:
                error = raised
                raise
            finally:
                self._requests.labels(name, code_of(error, context)).inc()

        return call

    def _generator(self, name: str, behaviour: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            error: BaseException | None = None
            try:
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response
            except BaseException as raised:
                error = raised
                raise
            finally:
                self._requests.labels(name, code_of(error, context)).inc()

        return call


def _word(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"


def code_of(error: BaseException | None, context: Any) -> str:
    """The name of the status that a call has ended with."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        left_s = context.time_remaining()
        is_late = left_s is not None and left_s <= 0
        return (grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED).name
    code = context.code()
    name = code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code or 0)
    if error is not None and name in (None, grpc.StatusCode.OK.name):
        return grpc.StatusCode.UNKNOWN.name  # what gRPC makes of an exception
    return name or grpc.StatusCode.UNKNOWN.name
