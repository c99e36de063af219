"""Chat request ↔ media and tickets: pure translation of the JSON body."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from consumer_shim.tickets import PullTicket, from_params, to_params
from producer.wire.pb import encoder_cache_pb2 as pb

_MODALITIES = {
    "image_url": "image",
    "image_pil": "image",  # offline only
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""The modality of a content part that brings media, by the part's type."""
_FOREIGN_TYPES = {*_MODALITIES, "input_image", "image"}
"""Types of parts with media, of the other APIs too."""
_UNSUPPORTED_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")


class RequestError(Exception):
    """The request is refused with an HTTP status before the engine sees it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class MediaPart:
    """A content part with media: where it stands, and the URL of its file, or what was decoded of one."""

    content: list[Any] = field(repr=False)
    index: int
    modality: str
    source: str | pb.DecodedMedia = field(repr=False)


def find_media(body: Mapping[str, Any]) -> list[MediaPart]:
    """The media parts of a chat request in prompt order; none if it has none.

    Raises:
        RequestError: a part, or what the request combines with it, cannot be served.
    """
    found = list(_content_parts(body))
    parts = [
        MediaPart(content, index, _MODALITIES[kind], _source(part[kind], kind))
        for content, index, part in found
        if (kind := _kind(part)) is not None
    ]
    modalities = {part.modality for part in parts}
    for modality in modalities & {str(part.get("type")).removesuffix("_embeds") for _, _, part in found}:
        raise RequestError(400, f"a request may carry {modality} media or {modality}_embeds parts, not both")
    for name in _UNSUPPORTED_FIELDS if parts else ():
        if body.get(name):
            raise RequestError(
                400, f"{name} cannot be set by a request here: the encoder service has settings of its own"
            )
    return parts


def names_media(value: Any) -> bool:
    """Whether there is a part with media anywhere in a body's `messages` or `input`, whichever API it is of."""
    if isinstance(value, dict):
        kind = value.get("type")
        return (isinstance(kind, str) and kind in _FOREIGN_TYPES) or any(map(names_media, value.values()))
    return isinstance(value, list) and any(map(names_media, value))


def apply_tickets(body: dict[str, Any], parts: Sequence[MediaPart], tickets: Sequence[pb.Ticket], address: str) -> None:
    """Replaces each media part of `body` by the content part of its ticket, in place.

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
    replacements = [_stand_in(ticket) for ticket in tickets]
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


def _kind(part: Mapping[str, Any]) -> str | None:
    """The type of a part that brings media; vLLM takes parts without a `type`, too."""
    return next((kind for kind in _MODALITIES if kind in part and part.get("type", kind) == kind), None)


def _source(source: Any, kind: str) -> str | pb.DecodedMedia:
    if kind != "image_pil":
        return _url(source, kind)
    if getattr(source, "mode", None) != "RGB":
        raise RequestError(400, f"image_pil is {str(source)[:80]}; expected a PIL image of mode RGB")
    return pb.DecodedMedia(shape=[source.height, source.width, 3], data=source.tobytes())


def _url(source: Any, kind: str) -> str:
    if kind == "input_audio" and isinstance(source, dict):
        return f"data:audio/{source.get('format')};base64,{source.get('data')}"
    url = source.get("url") if isinstance(source, dict) else source
    if not isinstance(url, str) or not url:
        raise RequestError(400, f"an {kind} part has no url; media must come with each request, whatever their uuid")
    return url


def data_of(url: str) -> bytes:
    """The file in a data URL.

    Raises:
        RequestError: the URL is another one, or malformed.
    """
    if not url.startswith("data:"):
        raise RequestError(400, "the media are not in a data URL, and nothing is fetched here")
    header, comma, payload = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise RequestError(400, "the media are not in a base64 data URL")
    if header.startswith("data:video/jpeg"):
        raise RequestError(400, "a video of single frames (video/jpeg) is not served; send the video's file")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError as error:
        raise RequestError(400, f"the media's data URL is not valid base64: {error}") from None


def _stand_in(ticket: pb.Ticket) -> dict[str, Any]:
    """The ticket's content part; ValueError for one that would have vLLM fetch something or go by another name."""
    part = json.loads(ticket.content_part)
    if not isinstance(part, dict) or part.get("uuid") != ticket.key:
        raise ValueError("the content part of a ticket does not go by its key")
    kind = part.get("type")
    if kind == "image_url" and str(_url(part.get(kind), kind)).startswith("data:"):
        return part
    if isinstance(kind, str) and kind.endswith("_embeds"):
        return part
    raise ValueError(f"the content part of a ticket is of type {str(kind)[:40]}")
