"""ASGI middleware for `vllm serve --middleware consumer_shim.middleware.EncodeMiddleware`.

A chat request's media go to a producer and are replaced by what stands for them, and tickets. Everything else passes
untouched.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from consumer_shim import budget
from consumer_shim.config import ShimConfig
from consumer_shim.endpoints import BodyEncoder, endpoint
from consumer_shim.inbox import Inbox, Message, Receive
from consumer_shim.pull import Failure
from consumer_shim.rewrite import RequestError
from consumer_shim.side_channel import ask_reason

logger = logging.getLogger(__name__)

Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_MAX_HELD = 64
_LOST = (502, 503)
"""Failures of a pull that another encode may mend: what was to be pulled has gone, or is not the embedding."""


class EncodeMiddleware:
    """Wraps vLLM's app. Its settings are the connector's, found in the app's state."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._encoder: BodyEncoder | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = endpoint(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if path is None:
            await self._app(scope, receive, send)
            return
        inbox = Inbox(receive)
        try:
            await self._exchange(path, scope, inbox, send)
        finally:
            await inbox.close()

    async def _exchange(self, path: str, scope: MutableMapping[str, Any], inbox: Inbox, send: Send) -> None:
        body: bytes | None = None
        for is_last in (False, True):  # an embedding that was lost before it was pulled is encoded again, once
            exchange = _Exchange(self._encoder_for, path, scope, inbox, send, body=body, may_retry=not is_last)
            try:
                await self._app(exchange.scope, exchange.receive, exchange.send)
            except RequestError:
                await exchange.refuse()
            if not exchange.is_lost:
                return
            body = exchange.body

    def _encoder_for(self, scope: MutableMapping[str, Any]) -> "BodyEncoder":
        if self._encoder is None:
            vllm_config = scope["app"].state.vllm_config
            transfer = vllm_config.ec_transfer_config
            if transfer is None:
                raise RequestError(500, "EncodeMiddleware needs --ec-transfer-config with consumer_shim.connector")
            config = ShimConfig.from_extra_config(transfer.ec_connector_extra_config)
            self._encoder = BodyEncoder(config, transfer.engine_id, vllm_config.model_config)
        return self._encoder


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
        path: str,
        scope: MutableMapping[str, Any],
        inbox: Inbox,
        send: Send,
        *,
        body: bytes | None,
        may_retry: bool,
    ) -> None:
        """`body` is the client's, where it was read before."""
        self.scope = {**scope, "headers": list(scope["headers"])}
        self.is_lost = False
        self._path = path
        self._may_retry = may_retry
        self.body = body
        """The client's, once it was read and holds media."""
        self._encoder_for = encoder_for
        self._inbox = inbox
        self._send = send
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
            body = await _read_body(self._inbox.take, encoder.max_body_bytes) if self.body is None else self.body
            done = None if body is None else await self._inbox.unless_gone(encoder.rewrite(self._path, body))
        except RequestError as error:
            self._refusal = error
            raise
        if body is None or done is None:
            return {"type": "http.disconnect"}
        rewritten, self._leases = done
        self.body = None if rewritten is body else body
        if rewritten is not body:
            self.scope["headers"][:] = _headers(self.scope["headers"], len(rewritten))
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
            self._is_over = True
            await _send_error(self._send, self._refusal.status, str(self._refusal))

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


def _headers(headers: Sequence[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(length).encode())]


async def _send_error(send: Send, status: int, message: str) -> None:
    """An error in the form of OpenAI's API."""
    kind = "BadRequestError" if status < 500 else "EncoderError"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in (429, 503):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
