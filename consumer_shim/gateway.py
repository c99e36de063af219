"""A chat request's media → tickets, for the middleware and for gateways of one's own.

producer = AsyncProducer("encoder:50051")
await encode_request(request, producer, timeout_s=60)   # the request can go to a vLLM with the shim's connector now
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc

from consumer_shim.client import AsyncProducer, ProducerError
from consumer_shim.dispatch import Dispatch, ItemsError, release_each
from consumer_shim.rewrite import MediaPart, RequestError, apply_tickets, data_of, find_media
from producer.wire.modality import modality_number
from producer.wire.origin import ORIGIN_PARAM, current
from producer.wire.pb import encoder_cache_pb2 as pb

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

    Cancelling it cancels the calls, and releases what they brought.

    Args:
        request: the JSON body.
        producer: its `address` must be one that the vLLM which gets the request is configured with. Of several, each
            item goes to the one that its content names, or to the next if that has no room or cannot be reached. They
            remember who is down: keep them from request to request.
        timeout_s: seconds for encoding, at whichever producers.
        fetch: the file at a URL (of a modality), for those that are no data URLs; without it they are refused.
        settings: `mm_processor_kwargs` and `media_io_kwargs` that the producers must have.

    Returns:
        The tickets, in the order of the media; none if the request has none, and is as it was.

    Raises:
        RequestError: the media cannot be served; its `status` is an HTTP status. The request is as it was.
    """
    parts = find_media(request)
    if not parts:
        return []
    items = await asyncio.gather(*(_item(part, fetch) for part in parts))
    producers = producer if isinstance(producer, Sequence) else [producer]
    try:
        found = await Dispatch(items, producers, timeout_s, settings).run()
    except ItemsError as failed:
        reason = failed.error.reason or failed.error.code.name
        raise RequestError(_http_status(failed.error), _sentence(failed, parts), reason) from None
    tickets = [ticket for ticket, _ in found]
    try:
        apply_tickets(request, parts, tickets, [giver.address for _, giver in found])
    except (ValueError, RecursionError) as error:
        await release_each(found)
        raise RequestError(502, f"the answer of {_names(found)} makes no sense: {error}") from None
    if origin := current().to_params():
        request["ec_transfer_params"][ORIGIN_PARAM] = origin  # its pulls begin in another process
    return tickets


def _sentence(failed: ItemsError, parts: Sequence[MediaPart]) -> str:
    if failed.place is None:
        return f"encoding at {failed.address} failed: {failed}"
    return f"{parts[failed.place].modality} {failed.place + 1} of {len(parts)}: {failed}"


def _names(found: Sequence[tuple[pb.Ticket, AsyncProducer]]) -> str:
    addresses = sorted({giver.address for _, giver in found})
    return f"producer {addresses[0]}" if len(addresses) == 1 else f"one of the producers {', '.join(addresses)}"


async def _item(part: MediaPart, fetch: Callable[[str, str], Awaitable[bytes]] | None) -> pb.MediaItem:
    modality = modality_number(part.modality)
    if isinstance(part.source, pb.DecodedMedia):
        return pb.MediaItem(modality=modality, decoded=part.source)
    if fetch is None or part.source.startswith("data:"):
        return pb.MediaItem(modality=modality, data=data_of(part.source))
    return pb.MediaItem(modality=modality, data=await fetch(part.source, part.modality))


def _http_status(error: ProducerError) -> int:
    if error.is_too_large:
        return 413
    return _HTTP_STATUS.get(error.code, 502)
