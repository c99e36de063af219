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
    "input_image": "image",
    "image_pil": "image",  # offline only
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""The modality of a content part that brings media, by the part's type."""
_OTHER_TYPES = (
    *("text", "thinking", "input_text", "output_text", "refusal", "tool_reference"),
    *("image_embeds", "video_embeds", "audio_embeds", "prompt_embeds"),
)
"""The other types that vLLM knows; a part of a type that it does not know is its to refuse."""
_TYPES_BY_FIELD = (
    *("image_url", "image_pil", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"),
    *("audio_url", "input_audio", "video_url"),
)
"""What vLLM takes a part for that has no type, or a uuid: the first of these fields that it has."""
_SCHEMA_FIELDS = ("tools", "functions", "response_format", "structured_outputs", "text", "chat_template_kwargs")
"""Fields of a body that describe data, in which names of media mean nothing."""
_MEDIA_FIELDS = ("images", "audio", "videos")
"""Fields of a body that are media themselves."""
_STAND_INS = ("image_embeds", "video_embeds", "audio_embeds", "image_url")
MEDIA_SETTINGS = ("mm_processor_kwargs", "media_io_kwargs")
"""What decides how media are decoded and processed: a server's, never a request's."""


class RequestError(Exception):
    """The request is refused with an HTTP status before the engine sees it.

    `reason` is the producer's, or the name of its gRPC status; "" where none had to do with it.
    """

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


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
    found = [(content, index, part, _kind(part)) for content, index, part in _content_parts(body)]
    parts = [
        MediaPart(content, index, _MODALITIES[kind], _source(part, kind))
        for content, index, part, kind in found
        if kind in _MODALITIES
    ]
    kinds = {kind for *_, kind in found}
    for modality in sorted({part.modality for part in parts}):
        if f"{modality}_embeds" in kinds:
            raise RequestError(400, f"a request may carry {modality} media or {modality}_embeds parts, not both")
    if parts and not isinstance(body.get("ec_transfer_params") or {}, dict):
        raise RequestError(400, "ec_transfer_params is not an object")
    for name in MEDIA_SETTINGS if parts else ():
        if body.get(name):
            raise RequestError(
                400, f"{name} cannot be set by a request here: the encoder service has settings of its own"
            )
    return parts


def names_media(body: Mapping[str, Any]) -> bool:
    """Whether there is a part with media anywhere in a body, whichever of vLLM's APIs it is of."""
    if any(body.get(name) for name in _MEDIA_FIELDS):
        return True
    left: list[Any] = [value for name, value in body.items() if name not in _SCHEMA_FIELDS]
    while left:
        value = left.pop()
        if isinstance(value, list):  # parts stand in lists; elsewhere such a field is some other data's
            if any(
                isinstance(one, dict) and (one.get("type") == "image" or _kind(one) in _MODALITIES) for one in value
            ):
                return True
            left += value
        elif isinstance(value, dict):
            left += value.values()
    return False


def apply_tickets(
    body: dict[str, Any], parts: Sequence[MediaPart], tickets: Sequence[pb.Ticket], addresses: Sequence[str]
) -> None:
    """Replaces each media part of `body` by the content part of its ticket, in place.

    Args:
        body: the request.
        parts: what `find_media` found in it.
        tickets: of each part.
        addresses: of the producer that gave each, as the connector is configured with it.

    Raises:
        ValueError: the tickets are malformed, or not as many as the parts. The body is as it was.
    """
    pulls = [PullTicket.from_message(ticket, address) for ticket, address in zip(tickets, addresses, strict=True)]
    replacements = list(zip(parts, map(_stand_in, tickets), strict=True))
    for part, replacement in replacements:
        part.content[part.index] = replacement
    body["ec_transfer_params"] = {**(body.get("ec_transfer_params") or {}), **to_params(pulls)}


def tickets_in(body: Mapping[str, Any]) -> list[PullTicket]:
    """The tickets in a request, whoever put them there.

    Raises:
        RequestError: they are malformed.
    """
    params = body.get("ec_transfer_params")
    try:
        return from_params(params if isinstance(params, dict) else None)
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
    """What vLLM takes a part for; None where it knows nothing of the kind."""
    kind, uuid = part.get("type"), part.get("uuid")
    if uuid is None and isinstance(kind, str):
        return kind if kind in _MODALITIES or kind in _OTHER_TYPES else None
    if uuid is None and kind is not None:
        return None
    return next((field for field in _TYPES_BY_FIELD if field in part), None)


def _source(part: Mapping[str, Any], kind: str) -> str | pb.DecodedMedia:
    if kind == "image_pil":
        return _pixels(part.get(kind))
    if kind == "input_audio":
        return _audio_url(part.get(kind))
    source = part.get("image_url" if kind == "input_image" else kind)
    url = _url_of(source)
    if not isinstance(url, str) or not url:
        raise RequestError(400, f"an {kind} part has no url; media must come with each request, whatever their uuid")
    return url


def _audio_url(audio: Any) -> str:
    data = audio.get("data") if isinstance(audio, dict) else None
    if not isinstance(data, str) or not data:
        raise RequestError(400, "an input_audio part has no data; media must come with each request")
    return f"data:audio/{audio.get('format')};base64,{data}"


def _pixels(image: Any) -> pb.DecodedMedia:
    if getattr(image, "mode", None) != "RGB":
        raise RequestError(400, f"image_pil is {str(image)[:80]}; expected a PIL image of mode RGB")
    return pb.DecodedMedia(shape=[image.height, image.width, 3], data=image.tobytes())


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
    if kind not in _STAND_INS or part.keys() != {"type", "uuid", kind}:
        raise ValueError(f"the content part of a ticket is of type {str(kind)[:40]}, or has more than its type says")
    if kind == "image_url" and not str(_url_of(part[kind])).startswith("data:"):
        raise ValueError("the content part of a ticket has an image without a data URL")
    return part


def _url_of(source: Any) -> Any:
    return source.get("url") if isinstance(source, dict) else source
