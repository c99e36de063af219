"""A chat request's media → tickets, for the middleware and for gateways of one's own.

producer = AsyncProducer("encoder:50051")
await encode_request(request, producer, timeout_s=60)   # the request can go to a vLLM with the shim's connector now
"""

import asyncio
from typing import Any

import grpc

from consumer_shim.client import AsyncProducer, ProducerError
from consumer_shim.rewrite import RequestError, apply_tickets, find_media
from producer.wire.pb import encoder_cache_pb2 as pb

_RELEASE_TIMEOUT_S = 2.0
_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""Every other status of the producer is 502: the encoder failed, not this server."""


async def encode_request(request: dict[str, Any], producer: AsyncProducer, timeout_s: float) -> list[pb.Ticket]:
    """Has the media of an OpenAI chat request encoded and replaces them, in place, by metadata and tickets.

    The producer's `address` must be one that the vLLM which gets the request is configured with.

    Returns:
        The tickets, in the order of the media; none if the request has none, and is as it was.

    Raises:
        RequestError: the media cannot be served; its `status` is an HTTP status. The request is as it was.
    """
    parts = find_media(request)
    if not parts:
        return []
    try:
        outcomes = await producer.encode([part.item for part in parts], timeout_s)
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
    except (ValueError, IndexError) as error:
        raise RequestError(502, f"the answer of producer {producer.address} makes no sense: {error}") from None
    return tickets


def _http_status(error: ProducerError) -> int:
    return _HTTP_STATUS.get(error.code, 502)
