"""Chat requests with pictures, videos and sounds, and their answers in a form that compares exactly.

A streamed answer and a plain one give the same `Answer`.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.kit.media import Media
from tests.kit.servers import SERVED_MODEL

PATH = "/v1/chat/completions"
MAX_TOKENS = 24
TIMEOUT_S = 120.0

Part = Media | str
Request = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token, as the server's JSON gives them."""
    text: str
    seconds: float = field(compare=False)
    """From sending the request to the answer's last byte."""


class ChatError(Exception):
    """The server refused the request, or gave it up midway (then the status is 200)."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body = body


def chat_request(parts: Sequence[Part], *, stream: bool = False, **overrides: Any) -> Request:
    """One user turn of media and texts in this order, answered greedily at a fixed length."""
    request: Request = {
        "model": SERVED_MODEL,
        "messages": [{"role": "user", "content": [_content(part) for part in parts]}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
        "stream": stream,
    }
    return request | overrides


def _content(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.modality == "audio":
        return {"type": "input_audio", "input_audio": {"data": part.base64, "format": "wav"}}
    kind = f"{part.modality}_url"
    return {"type": kind, kind: {"url": part.data_url}}


def ask(url: str, request: Request, *, timeout_s: float = TIMEOUT_S) -> Answer:
    """Send a request, streamed or not as it says. Raises `ChatError` where there is no whole answer."""
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False, verify=False) as client:  # plain HTTP
        started_s = time.monotonic()
        choices = _streamed(client, request) if request.get("stream") else _plain(client, request)
        pieces = [_piece(choice) for choice in choices]
        seconds = time.monotonic() - started_s
    return Answer(
        token_ids=tuple(token for tokens, _, _ in pieces for token in tokens),
        logprobs=tuple(value for _, logprobs, _ in pieces for value in logprobs),
        text="".join(text for _, _, text in pieces),
        seconds=seconds,
    )


def _plain(client: httpx.Client, request: Request) -> list[dict[str, Any]]:
    response = client.post(PATH, json=request)
    if response.status_code != httpx.codes.OK:
        raise ChatError(response.status_code, response.text)
    return list(response.json()["choices"])


def _streamed(client: httpx.Client, request: Request) -> Iterator[dict[str, Any]]:
    with client.stream("POST", PATH, json=request) as response:
        if response.status_code != httpx.codes.OK:
            raise ChatError(response.status_code, response.read().decode())
        for event in _events(response):
            if "error" in event:
                raise ChatError(response.status_code, json.dumps(event["error"]))
            yield from event["choices"]


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The stream's JSON events. A stream that ends without its end mark was cut off."""
    for line in _lines(response.iter_bytes()):
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)
    raise ChatError(response.status_code, "the stream ended before [DONE]")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines; an answer's text may have characters that other splitters take for ends of lines."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _piece(choice: dict[str, Any]) -> tuple[list[int], list[float], str]:
    """Token ids, their logprobs and the text of a whole choice or of one streamed part of it."""
    message = choice.get("message") or choice.get("delta") or {}
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    return choice.get("token_ids") or [], [entry["logprob"] for entry in logprobs], message.get("content") or ""
