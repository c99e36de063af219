"""ASGI middleware for `vllm serve --middleware consumer_shim.middleware.EncodeMiddleware`.

A chat request's media go to a producer and are replaced by what stands for them, and tickets. Everything else passes
untouched.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from consumer_shim import budget, metrics
from consumer_shim.config import ShimConfig
from consumer_shim.endpoints import BodyEncoder, endpoint
from consumer_shim.inbox import Inbox, Message, Receive
from consumer_shim.logs import ShimLogger, join_vllm
from consumer_shim.pull import Failure
from consumer_shim.rewrite import RequestError
from consumer_shim.side_channel import ask_reason
from producer.wire.origin import REQUEST_ID_HEADER, Origin, work_for
from producer.wire.tracing import Span, Tracing

logger = ShimLogger(__name__)

Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_ID_HEADER = REQUEST_ID_HEADER.encode()
_MAX_HELD = 64
_LOST = (502, 503)
"""Failures of a pull that another encode may mend: what was to be pulled has gone, or is not the embedding."""


class EncodeMiddleware:
    """Wraps vLLM's app. Its settings are the connector's, found in the app's state."""

    def __init__(self, app: App) -> None:
        metrics.register()
        self._app = app
        self._encoder: BodyEncoder | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = endpoint(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if path is None:
            await self._app(scope, receive, send)
            return
        inbox, call = Inbox(receive), _Call(path, scope["headers"], send)
        try:
            await self._exchange(call, scope, inbox)
        finally:
            call.end()
            await inbox.close()

    async def _exchange(self, call: "_Call", scope: MutableMapping[str, Any], inbox: Inbox) -> None:
        body: bytes | None = None
        for is_last in (False, True):  # an embedding that was lost before it was pulled is encoded again, once
            exchange = _Exchange(self._encoder_for, call, scope, inbox, body=body, may_retry=not is_last)
            try:
                await self._app(exchange.scope, exchange.receive, exchange.send)
            except RequestError:
                await exchange.refuse()
            if not exchange.is_lost:
                return
            metrics.count_reencode()
            body = exchange.body

    def _encoder_for(self, scope: MutableMapping[str, Any]) -> "BodyEncoder":
        if self._encoder is None:
            vllm_config = scope["app"].state.vllm_config
            transfer = vllm_config.ec_transfer_config
            if transfer is None:
                raise RequestError(500, "EncodeMiddleware needs --ec-transfer-config with consumer_shim.connector")
            join_vllm()
            config = ShimConfig.from_extra_config(transfer.ec_connector_extra_config)
            self._encoder = BodyEncoder(
                config, transfer.engine_id, vllm_config.model_config, vllm_traces=_traces(vllm_config)
            )
        return self._encoder


class _Call:
    """One request of a client's, from its arrival to its end: whom it is for, its span, the status that it got."""

    def __init__(self, path: str, headers: Sequence[tuple[bytes, bytes]], send: Send) -> None:
        """`path` is the endpoint's."""
        self.path = path
        self.origin = Origin.from_headers(headers).named()
        self._send = send
        self._began_ns = time.time_ns()
        self.is_ours = False
        """Whether it brought media, or was refused here; others leave no span."""
        self._tracing: Tracing | None = None
        self._span: Span | None = None
        self._vllm_traces = False
        self._status = 0

    def trace(self, tracing: Tracing | None, *, vllm_traces: bool) -> None:
        """Begins the span, if there is tracing and it has not begun; the origin is it from then on."""
        if tracing is not None and self._span is None:
            self._tracing, self._vllm_traces = tracing, vllm_traces
            with work_for(self.origin):
                self._span = tracing.begin(f"POST {self.path}", kind="server", start_ns=self._began_ns)
            self.origin = self._span.origin

    def headers_for(self, headers: Sequence[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
        """The client's for a body of another length, with an id by which vLLM names the request then, too."""
        changed = {b"content-length": str(length).encode(), b"transfer-encoding": b""}
        if not any(name.lower() == _ID_HEADER for name, _ in headers):
            changed[_ID_HEADER] = self.origin.request_id.encode()
        if self._span is not None and self._vllm_traces:
            changed |= {b"traceparent": self.origin.traceparent.encode()}  # vLLM's span lies below ours
        kept = [(name, value) for name, value in headers if name.lower() not in changed]
        return [*kept, *((name, value) for name, value in changed.items() if value)]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)

    def end(self) -> None:
        """The response is over, or will never come."""
        if self._span is not None and self._tracing is not None and self.is_ours:
            set_code = self._span.fail if self._status >= 500 or not self._status else self._span.set
            set_code(code=self._status)
            self._tracing.end(self._span)


class _Exchange:
    """One request and its response, both seen by the app through here.

    The app gets the rewritten body when it asks for it. vLLM runs this middleware outside of its own: so by then it has
    checked who is asking, and no media are encoded for a request that it turns away.

    An 'internal error' of the app is replaced by the reason, where the connector knows it. vLLM begins a stream with an
    event of the role alone for each choice, then says that the request failed; so a response is held back until its
    first bytes that say something else. Where it says that an embedding was lost, nothing has reached the client, and
    the request may be begun again with `body`.

    A client that leaves while its media are encoded ends that: the producer has its room again at once.
    """

    def __init__(
        self,
        encoder_for: "Callable[[MutableMapping[str, Any]], BodyEncoder]",
        call: _Call,
        scope: MutableMapping[str, Any],
        inbox: Inbox,
        *,
        body: bytes | None,
        may_retry: bool,
    ) -> None:
        """`body` is the client's, where it was read before."""
        self.scope = {**scope, "headers": list(scope["headers"])}
        self.is_lost = False
        self._call = call
        self._may_retry = may_retry
        self.body = body
        """The client's, once it was read and holds media."""
        self._encoder_for = encoder_for
        self._inbox = inbox
        self._send = call.send
        self._was_read = False
        self._refusal: RequestError | None = None
        self._leases: list[str] = []
        self._held: list[Message] | None = []
        self._is_over = False

    async def receive(self) -> Message:
        """The whole body at the first call, then whatever comes, so that a disconnect still arrives.

        Raises:
            RequestError: the media cannot be served; `send` says so, whatever the app makes of it.
        """
        if self._was_read:
            return await self._inbox.take()
        self._was_read = True
        try:
            encoder = self._encoder = self._encoder_for(self.scope)
            self._call.trace(encoder.tracing, vllm_traces=encoder.vllm_traces)
            body = await _read_body(self._inbox.take, encoder.max_body_bytes) if self.body is None else self.body
            with work_for(self._call.origin):
                done = None if body is None else await self._inbox.unless_gone(encoder.rewrite(self._call.path, body))
        except RequestError as error:
            self._refusal = error
            raise
        if body is None or done is None:
            return {"type": "http.disconnect"}
        rewritten, self._leases = done
        self.body = None if rewritten is body else body
        if rewritten is not body:
            self._call.is_ours = True
            self.scope["headers"][:] = self._call.headers_for(self.scope["headers"], len(rewritten))
        return {"type": "http.request", "body": rewritten, "more_body": False}

    async def send(self, message: Message) -> None:
        """Passes the app's response on, or another in its place."""
        if self.is_lost:
            return
        if self._refusal is not None:
            await self.refuse()
        elif self._leases and self._held is not None:
            await self._hold(self._held, message)
        else:
            await self._send(message)

    async def refuse(self) -> None:
        """Answers with the refusal, once."""
        if self._refusal is not None and not self._is_over:
            self._is_over = self._call.is_ours = True
            with work_for(self._call.origin):
                logger.info("%s is answered with %d %s", self._call.path, self._refusal.status, self._refusal.reason)
            await _send_error(self._send, self._refusal.status, str(self._refusal), self._call.origin.request_id)

    async def _hold(self, held: list[Message], message: Message) -> None:
        held.append(message)
        if message["type"] == "http.response.start" or (_is_opening(message) and len(held) < _MAX_HELD):
            return
        self._held = None
        failure = await self._failure(held[0], message)
        if failure is not None:
            may_mend = self._may_retry and self.body is not None and failure.http_status in _LOST
            self.is_lost = may_mend and budget.PROCESS.take()
            self._refusal = RequestError(failure.http_status, failure.message)
            if not self.is_lost:
                await self.refuse()
            return
        for one in held:
            await self._send(one)

    async def _failure(self, start: Message, message: Message) -> Failure | None:
        """Why the request failed; None where it did not, or nobody knows."""
        in_stream = start["status"] == 200 and message.get("body", b"").startswith(b'data: {"error"')
        if not self._leases or (start["status"] != 500 and not in_stream):
            return None
        return await asyncio.to_thread(ask_reason, self._encoder.engine_id, self._leases)


def _traces(vllm_config: Any) -> bool:
    """Whether vLLM makes spans of its own; if not, it warns of requests that bring a trace's context."""
    return bool(getattr(getattr(vllm_config, "observability_config", None), "otlp_traces_endpoint", None))


def _is_opening(message: Message) -> bool:
    """Whether it is the event that a streamed choice begins with: its role, and no content."""
    body = message.get("body", b"")
    return bool(message.get("more_body")) and body.startswith(b"data: ") and b'"delta":{"role":' in body


async def _read_body(receive: Receive, most: int) -> bytes | None:
    """The whole body; None if the client left. RequestError where it is larger than `most` bytes."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise RequestError(413, f"the request has more than {most} bytes")
        if not message.get("more_body", False):
            return bytes(body)


async def _send_error(send: Send, status: int, message: str, request_id: str) -> None:
    """An error in the form of OpenAI's API."""
    kind = "BadRequestError" if status < 500 else "EncoderError"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((_ID_HEADER, request_id.encode()))
    if status in (429, 503):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
