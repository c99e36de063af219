"""What becomes of a request's body, by the endpoint of vLLM's that it is for."""

import asyncio
import json
from typing import Any

from consumer_shim.client import AsyncProducer
from consumer_shim.config import ShimConfig
from consumer_shim.dispatch import release_all
from consumer_shim.fingerprint import FingerprintPin
from consumer_shim.gateway import encode_request
from consumer_shim.rewrite import MEDIA_SETTINGS, RequestError, find_media, names_media, tickets_in
from consumer_shim.side_channel import leave_tickets
from consumer_shim.tickets import PullTicket
from producer.wire import tracing
from producer.wire.origin import current

CHAT = "/v1/chat/completions"
TOKENIZE = "/tokenize"
OTHERS = (
    *("/v1/responses", "/v1/responses/render", "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"),
    *("/v1/chat/completions/batch", "/v1/chat/completions/render", "/invocations", "/inference/v1/generate"),
    *("/cohere/v2/chat", "/cohere/v2/chat/render", "/v1/embeddings", "/v2/embed", "/pooling", "/classify"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/systemone"),
)
"""Endpoints that take media, but neither metadata nor tickets as chat completions do."""


def endpoint(path: str) -> str | None:
    """The endpoint at a path, which may have a prefix; None for one that takes no media."""
    return max((one for one in (CHAT, TOKENIZE, *OTHERS) if path.endswith(one)), key=len, default=None)


class BodyEncoder:
    """Has media encoded by the producers of one server. For the event loop that made it."""

    def __init__(self, config: ShimConfig, engine_id: str, model_config: Any, *, vllm_traces: bool = False) -> None:
        """`model_config` is vLLM's; `vllm_traces` says whether it makes spans of its own."""
        from consumer_shim.fetch import Fetcher

        multimodal = model_config.multimodal_config
        self._settings = {name: getattr(multimodal, name) for name in MEDIA_SETTINGS}
        self._fetch = Fetcher(model_config, config.max_body_bytes)
        self._timeout_s = config.encode_timeout_s
        self.max_body_bytes = config.max_body_bytes
        self.engine_id = engine_id
        self.vllm_traces = vllm_traces
        pin = FingerprintPin(config.fingerprint, learns=len(config.producers) > 1)
        self.tracing = tracing.start(config.otlp_traces_endpoint, config.trace_sample_ratio, "ec-producer-shim")
        self._producers = [
            AsyncProducer(address, security=config.security, pin=pin, tracing=self.tracing)
            for address in config.producers
        ]

    async def rewrite(self, path: str, body: bytes) -> tuple[bytes, list[str]]:
        """The body to hand on to an endpoint, itself if it has no media, and the leases of the tickets in it.

        Raises:
            RequestError: the media cannot be served.
        """
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            return body, []  # vLLM says what is wrong with it
        if not isinstance(request, dict):
            return body, []
        if path in OTHERS:
            if names_media(request):
                raise RequestError(
                    400, f"{path} takes no media on this server, whose encoder is elsewhere; {CHAT} does"
                )
            return body, []
        is_beam_search = path == CHAT and bool(request.get("use_beam_search"))
        if is_beam_search and self._settings["media_io_kwargs"] and find_media(request):
            raise RequestError(
                400, "use_beam_search is not served with media where --media-io-kwargs is set: vLLM changes their uuid"
            )
        has_media = await encode_request(
            request, self._producers, self._timeout_s, fetch=self._fetch, settings=self._settings
        )
        tickets = tickets_in(request)
        if tickets and is_beam_search:
            await self._leave(tickets)
        elif has_media and path == TOKENIZE:  # the prompt's length needs no embedding
            await self._release(tickets)
        return (json.dumps(request).encode() if has_media else body), [ticket.lease_id for ticket in tickets]

    async def _leave(self, tickets: list[PullTicket]) -> None:
        """Beam search makes requests of its own, which have this one's media under their uuid, but not its tickets."""
        is_left = False
        try:
            is_left = await asyncio.to_thread(leave_tickets, self.engine_id, tickets, current())
        finally:
            if not is_left:
                await self._release(tickets)
        if not is_left:
            raise RequestError(503, "use_beam_search: the engine did not take the tickets of the request's media")

    async def _release(self, tickets: list[PullTicket]) -> None:
        await asyncio.gather(
            *(
                release_all(producer, [ticket.lease_id for ticket in tickets if ticket.address == producer.address])
                for producer in self._producers
            )
        )
