"""Bodies of requests to vLLM, as the middleware rewrites them. The producer's answers are in order here."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from consumer_shim.config import ShimConfig
from consumer_shim.endpoints import CHAT, TOKENIZE, BodyEncoder
from consumer_shim.rewrite import RequestError, find_media, names_media, tickets_in
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.fuzz.checks import check_said, expect
from tests.fuzz.loopback import Answerer
from tests.fuzz.mutate import json_text, with_kind

_PATHS = (CHAT, TOKENIZE, "/v1/responses", "/v1/chat/completions/render")
_KEY = "ab" * 32


class _Tickets:
    """A ticket for each item; it knows the leases that nobody has released."""

    def __init__(self) -> None:
        self.leases: set[str] = set()

    def encode(self, request: bytes) -> bytes:
        items = pb.EncodeRequest.FromString(request).items
        return pb.EncodeResponse(
            outcomes=[pb.ItemOutcome(ticket=self._ticket(item)) for item in items]
        ).SerializeToString()

    def release(self, request: bytes) -> bytes:
        released = pb.ReleaseRequest.FromString(request)
        self.leases -= {released.lease_id, *released.lease_ids}
        return pb.ReleaseResponse(released=True).SerializeToString()

    def _ticket(self, item: pb.MediaItem) -> pb.Ticket:
        lease_id = f"{len(self.leases):032x}"
        self.leases.add(lease_id)
        part = {"type": "image_embeds", "uuid": _KEY, "image_embeds": {"image_grid_thw": [1, 2, 2]}}
        return pb.Ticket(
            key=_KEY,
            modality=item.modality,
            num_rows=1,
            width=8,
            dtype="float32",
            epoch="00" * 8,
            lease_id=lease_id,
            content_part=json.dumps(part),
        )


class _Shim:
    """The middleware's encoder, and a producer at the far end."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.producer = _Tickets()
        address = Answerer({"Encode": self.producer.encode, "Release": self.producer.release}).address
        multimodal = SimpleNamespace(mm_processor_kwargs=None, media_io_kwargs={})
        model_config = SimpleNamespace(
            multimodal_config=multimodal, allowed_local_media_path="", allowed_media_domains=["nobody.invalid"]
        )
        self._config = ShimConfig(producers=(address,), encode_timeout_s=30)
        self._model_config = model_config
        self._encoder = self.loop.run_until_complete(self._encoder_here())

    async def _encoder_here(self) -> BodyEncoder:
        return BodyEncoder(self._config, "fuzz-nobody", self._model_config)

    def rewrite(self, path: str, body: bytes) -> tuple[bytes, list[str]]:
        self.producer.leases.clear()
        return self.loop.run_until_complete(self._encoder.rewrite(path, body))


_shim: Any = None


def target(data: bytes) -> None:
    """The endpoint, then the body."""
    global _shim
    _shim = _shim or _Shim()
    if not data:
        return
    path, body = _PATHS[data[0] % len(_PATHS)], data[1:]
    before = _parsed(body)
    if before is not None:
        _check_kinds(before)
    try:
        made, leases = _shim.rewrite(path, body)
    except RequestError as error:
        expect(400 <= error.status <= 599, f"a refusal has status {error.status}")
        check_said(str(error), data)
        expect(not _shim.producer.leases, "a refused request keeps leases")
        return
    if made is body:
        return
    expect(before is not None, "what is no object was rewritten")
    _check(before, json.loads(made), leases, path)


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _check_kinds(body: dict[str, Any]) -> None:
    """A part that chat completions has encoded is one that the other endpoints refuse."""
    try:
        parts = find_media(body)
    except RequestError:
        return
    expect(not parts or names_media(body), "media are found that are not named")


def _check(before: Any, after: Any, leases: list[str], path: str) -> None:
    """Nothing but the media has changed, and each has its ticket."""
    parts = find_media(before)
    tickets = tickets_in(after)
    expect(len(tickets) >= len(parts) > 0, f"{len(parts)} media have {len(tickets)} tickets")
    expect({ticket.lease_id for ticket in tickets} == set(leases), "leases are not those of the tickets")
    expect(path == TOKENIZE or _shim.producer.leases <= set(leases), "a lease is forgotten")
    expect(not find_media(after), "media are left")
    for part in parts:
        part.content[part.index] = "media"
    for message in after["messages"]:
        content = message.get("content") if isinstance(message, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("uuid") == _KEY and part.get("type") == "image_embeds":
                content[index] = "media"
    for body in (before, after):
        body.pop("ec_transfer_params", None)
    expect(json.dumps(before) == json.dumps(after), "more than the media has changed")


_WORDS: tuple[Any, ...] = (
    *("messages", "content", "type", "text", "role", "user", "uuid", "tools", "ec_transfer_params", "image", "images"),
    *("image_url", "input_image", "image_pil", "video_url", "audio_url", "input_audio", "image_embeds", "url"),
    *("video_embeds", "audio_embeds", "thinking", "refusal", "use_beam_search", "mm_processor_kwargs", "format"),
    *("media_io_kwargs", "ec_producer_tickets", "data", "data:image/png;base64,AAAA", "data:video/jpeg;base64,AAAA"),
    *("data:,x", "http://127.0.0.1/x", "file:///etc/hostname", "AAAA", "wav", True, [], {}),
    {"type": "text", "text": "what is it"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"image_url": "data:image/png;base64,AAAA", "uuid": "mine"},
    *("key", "ab" * 32, "lease_id", "address", "epoch", "num_rows", "width", "dtype", "float32", "modality"),
)
mutate = with_kind(len(_PATHS), json_text(_WORDS))


def seeds() -> dict[str, bytes]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    text = {"type": "text", "text": "what is it"}
    ticket = {"key": "ab" * 32, "modality": "image", "num_rows": 1, "width": 8, "dtype": "float32"}
    ticket |= {"epoch": "00" * 8, "lease_id": "cd" * 16, "address": "127.0.0.1:50051"}
    bodies = {
        "image": {"messages": [{"role": "user", "content": [image, text]}]},
        "mixed": {"messages": [{"role": "system", "content": "hi"}, {"role": "user", "content": [text, audio, image]}]},
        "beam": {"messages": [{"role": "user", "content": [image]}], "use_beam_search": True},
        "tickets": {
            "messages": [{"role": "user", "content": [text]}],
            "ec_transfer_params": {"ec_producer_tickets": [ticket]},
        },
    }
    made = {name: b"\0" + json.dumps(body).encode() for name, body in bodies.items()}
    return made | {"tokenize": b"\1" + made["mixed"][1:], "responses": b"\2" + made["image"][1:]}
