"""A chat request's media → tickets, for the middleware and for gateways of one's own.

producer = AsyncProducer("encoder:50051")
await encode_request(request, producer, timeout_s=60)   # the request can go to a vLLM with the shim's connector now
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc

from consumer_shim.client import AsyncProducer, ProducerError
from consumer_shim.rewrite import MediaPart, RequestError, apply_tickets, data_of, find_media
from producer.wire.modality import modality_number
from producer.wire.pb import encoder_cache_pb2 as pb

_RELEASE_TIMEOUT_S = 2.0
_ELSEWHERE = (429, 503)
"""Refusals of one producer that another may not share: overload, and that it cannot be reached."""
_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""Every other status of the producer is 502: the encoder failed, not this server."""


async def encode_request(
    request: dict[str, Any],
    producer: AsyncProducer | Sequence[AsyncProducer],
    timeout_s: float,
    *,
    fetch: Callable[[str, str], Awaitable[bytes]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[pb.Ticket]:
    """Has the media of an OpenAI chat request encoded and puts what stands for them, and tickets, in their place.

    Args:
        request: the JSON body.
        producer: its `address` must be one that the vLLM which gets the request is configured with. Of several, those
            that cannot be reached or have no room are passed over.
        timeout_s: seconds for encoding, at whichever producer.
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
    producers = list(producer) if isinstance(producer, Sequence) else [producer]
    deadline_s = time.monotonic() + timeout_s
    while True:
        one = producers.pop(0)
        try:
            tickets = await _encode(parts, items, one, deadline_s - time.monotonic(), settings)
            break
        except RequestError as error:
            if not producers or error.status not in _ELSEWHERE:
                raise
    try:
        apply_tickets(request, parts, tickets, one.address)
    except (ValueError, RecursionError) as error:
        await release_all(one, [ticket.lease_id for ticket in tickets])
        raise RequestError(502, f"the answer of producer {one.address} makes no sense: {error}") from None
    return tickets


async def _encode(
    parts: Sequence[MediaPart],
    items: Sequence[pb.MediaItem],
    producer: AsyncProducer,
    timeout_s: float,
    settings: Mapping[str, Any] | None,
) -> list[pb.Ticket]:
    """All tickets, or RequestError for the first item that has none."""
    try:
        outcomes = await producer.encode(items, timeout_s, settings=settings)
    except ProducerError as error:
        raise RequestError(_http_status(error), f"encoding at {producer.address} failed: {error}") from None
    tickets = [one for one in outcomes if isinstance(one, pb.Ticket)]
    failed = next(((place, one) for place, one in enumerate(outcomes) if isinstance(one, ProducerError)), None)
    if failed is None:
        return tickets
    await release_all(producer, [ticket.lease_id for ticket in tickets])  # what the others were given will not be used
    place, reason = failed
    raise RequestError(_http_status(reason), f"{parts[place].modality} {place + 1} of {len(parts)}: {reason}")


async def release_all(producer: AsyncProducer, lease_ids: Iterable[str]) -> None:
    """Ends leases that nobody will use, as far as the producer can be reached soon."""
    await asyncio.gather(*(producer.release(lease_id, _RELEASE_TIMEOUT_S) for lease_id in lease_ids))


async def _item(part: MediaPart, fetch: Callable[[str, str], Awaitable[bytes]] | None) -> pb.MediaItem:
    modality = modality_number(part.modality)
    if isinstance(part.source, pb.DecodedMedia):
        return pb.MediaItem(modality=modality, decoded=part.source)
    if fetch is None or part.source.startswith("data:"):
        return pb.MediaItem(modality=modality, data=data_of(part.source))
    return pb.MediaItem(modality=modality, data=await fetch(part.source, part.modality))


def _http_status(error: ProducerError) -> int:
    return _HTTP_STATUS.get(error.code, 502)
