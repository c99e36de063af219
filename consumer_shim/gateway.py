"""A chat request's media → tickets, for the middleware and for gateways of one's own.

producer = AsyncProducer("encoder:50051")
await encode_request(request, producer, timeout_s=60)   # the request can go to a vLLM with the shim's connector now
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from consumer_shim.client import AsyncProducer, ProducerError
from consumer_shim.rewrite import MediaPart, RequestError, apply_tickets, data_of, find_media
from producer.wire.modality import modality_number
from producer.wire.pb import encoder_cache_pb2 as pb

_RELEASE_TIMEOUT_S = 2.0
_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""Every other status of the producer is 502: the encoder failed, not this server."""


async def encode_request(
    request: dict[str, Any],
    producer: AsyncProducer,
    timeout_s: float,
    *,
    fetch: Callable[[str, str], Awaitable[bytes]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[pb.Ticket]:
    """Has the media of an OpenAI chat request encoded and puts what stands for them, and tickets, in their place.

    Args:
        request: the JSON body.
        producer: its `address` must be one that the vLLM which gets the request is configured with.
        timeout_s: seconds for encoding.
        fetch: the file at a URL (of a modality), for those that are no data URLs; without it they are refused.
        settings: `mm_processor_kwargs` and `media_io_kwargs` that the producer must have.

    Returns:
        The tickets, in the order of the media; none if the request has none, and is as it was.

    Raises:
        RequestError: the media cannot be served; its `status` is an HTTP status. The request is as it was.
    """
    parts = find_media(request)
    if not parts:
        return []
    items = await asyncio.gather(*(_item(part, fetch) for part in parts))
    try:
        outcomes = await producer.encode(items, timeout_s, settings=settings)
    except ProducerError as error:
        raise RequestError(_http_status(error), f"encoding at {producer.address} failed: {error}") from None
    tickets = [one for one in outcomes if isinstance(one, pb.Ticket)]
    failed = next(((index, one) for index, one in enumerate(outcomes, 1) if isinstance(one, ProducerError)), None)
    if failed is not None:  # what the others were given will not be used
        await asyncio.gather(*(producer.release(ticket.lease_id, _RELEASE_TIMEOUT_S) for ticket in tickets))
        index, reason = failed
        modality = parts[index - 1].modality if index <= len(parts) else "item"
        raise RequestError(_http_status(reason), f"{modality} {index} of {len(parts)}: {reason}")
    try:
        apply_tickets(request, parts, tickets, producer.address)
    except (ValueError, IndexError, RecursionError) as error:
        raise RequestError(502, f"the answer of producer {producer.address} makes no sense: {error}") from None
    return tickets


async def _item(part: MediaPart, fetch: Callable[[str, str], Awaitable[bytes]] | None) -> pb.MediaItem:
    modality = modality_number(part.modality)
    if isinstance(part.source, pb.DecodedMedia):
        return pb.MediaItem(modality=modality, decoded=part.source)
    if fetch is None or part.source.startswith("data:"):
        return pb.MediaItem(modality=modality, data=data_of(part.source))
    return pb.MediaItem(modality=modality, data=await fetch(part.source, part.modality))


def _http_status(error: ProducerError) -> int:
    return _HTTP_STATUS.get(error.code, 502)
