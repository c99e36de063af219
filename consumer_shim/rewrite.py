"""Chat request ↔ media and tickets: pure translation of the JSON body."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from consumer_shim.tickets import PullTicket, from_params, to_params
from producer.wire.modality import modality_number
from producer.wire.pb import encoder_cache_pb2 as pb

_EMBEDS = {"image": "image_embeds"}
"""The content part that carries a modality's metadata, by modality."""
_UNSUPPORTED_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")


class RequestError(Exception):
    """The request is refused with an HTTP status before the engine sees it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class MediaPart:
    """A content part with media: where it stands, and the file that it holds."""

    content: list[Any] = field(repr=False)
    index: int
    modality: str
    data: bytes = field(repr=False)

    @property
    def item(self) -> pb.MediaItem:
        return pb.MediaItem(modality=modality_number(self.modality), data=self.data)


def find_media(body: Mapping[str, Any]) -> list[MediaPart]:
    """The media parts of a chat request in prompt order; none if it has none.

    Raises:
        RequestError: a part, or what the request combines with it, cannot be served.
    """
    found = list(_content_parts(body))
    parts = [
        MediaPart(content, index, "image", _data(part["image_url"]))
        for content, index, part in found
        if part.get("type", "image_url") == "image_url" and "image_url" in part
    ]
    if parts and any(part.get("type") == "image_embeds" for _, _, part in found):
        raise RequestError(400, "a request may carry image_url or image_embeds parts, not both")
    for name in _UNSUPPORTED_FIELDS if parts else ():
        if body.get(name):
            raise RequestError(
                400, f"{name} cannot be set by a request here: the encoder service has settings of its own"
            )
    return parts


def apply_tickets(body: dict[str, Any], parts: Sequence[MediaPart], tickets: Sequence[pb.Ticket], address: str) -> None:
    """Replaces each media part of `body` by its ticket's metadata, in place.

    Args:
        body: the request.
        parts: what `find_media` found in it.
        tickets: of each part.
        address: of the producer that gave them, as the connector is configured with it.

    Raises:
        RequestError: `ec_transfer_params` has another form.
        ValueError, IndexError: the tickets are malformed, or not as many as the parts.
    """
    params = body.get("ec_transfer_params") or {}
    if not isinstance(params, dict):
        raise RequestError(400, "ec_transfer_params is not an object")
    pulls = [PullTicket.from_message(ticket, address) for ticket in tickets]
    replacements = [
        {"type": _EMBEDS[part.modality], _EMBEDS[part.modality]: _metadata(ticket), "uuid": ticket.key}
        for part, ticket in zip(parts, tickets, strict=True)
    ]
    for part, replacement in zip(parts, replacements, strict=True):
        part.content[part.index] = replacement
    body["ec_transfer_params"] = {**params, **to_params(pulls)}


def leases_in(body: Mapping[str, Any]) -> list[str]:
    """Leases of the tickets that a client put into its request itself.

    Raises:
        RequestError: they are malformed.
    """
    params = body.get("ec_transfer_params")
    try:
        return [ticket.lease_id for ticket in from_params(params if isinstance(params, dict) else None)]
    except ValueError as error:
        raise RequestError(400, str(error)) from None


def _content_parts(body: Mapping[str, Any]) -> Iterator[tuple[list[Any], int, dict[str, Any]]]:
    """Every part of every message: the list it stands in, its place there, and itself."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from ((content, index, part) for index, part in enumerate(content) if isinstance(part, dict))


def _data(source: Any) -> bytes:
    url = source.get("url") if isinstance(source, dict) else source
    if not isinstance(url, str) or not url:
        raise RequestError(400, "an image_url part has no url")
    if not url.startswith("data:"):
        raise RequestError(
            400, "image_url is not a data URL; the encoder service takes media as bytes and fetches nothing"
        )
    header, comma, payload = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise RequestError(400, "image_url is not a base64 data URL")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError as error:
        raise RequestError(400, f"image_url is not valid base64: {error}") from None


def _metadata(ticket: pb.Ticket) -> dict[str, Any]:
    return {name: _nested(array) for name, array in ticket.metadata.items()}


def _nested(array: pb.NumberArray) -> Any:
    """The array as vLLM takes it in JSON: numbers, flat."""
    values: list[int] | list[float] = list(array.ints) or list(array.floats)
    return values if array.shape else values[0]
