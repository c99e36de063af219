"""A streamed answer and a plain one compare as equal; failures keep their status.

The fake server has vLLM's JSON shapes as its 0.32 sends them, cut down to what `ask`
reads; it does not check requests, and sends usage and role chunks nowhere.
"""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from tests.kit.chat import ChatError, ask, chat_request
from tests.kit.clips import sounds, videos
from tests.kit.photos import photos

TOKENS = [5, 6, 7]
LOGPROBS = [-0.5, -1.25, -2.0]


class FakeServer(BaseHTTPRequestHandler):
    status: ClassVar[int] = 200
    events: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = "".join(f"data: {event}\n\n" for event in self.events) if request["stream"] else json.dumps(PLAIN)
        self.send_response(self.status)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def logprobs(values: list[float]) -> dict[str, object]:
    return {"content": [{"logprob": value} for value in values]}


PLAIN = {
    "choices": [{"message": {"content": "abc"}, "token_ids": TOKENS, "logprobs": logprobs(LOGPROBS)}],
}
STREAM = [
    json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}, "logprobs": None, "token_ids": None}]}),
    json.dumps({"choices": [{"delta": {"content": "a"}, "token_ids": [5], "logprobs": logprobs([-0.5])}]}),
    json.dumps({"choices": [{"delta": {"content": "bc"}, "token_ids": [6, 7], "logprobs": logprobs([-1.25, -2.0])}]}),
    "[DONE]",
]


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(FakeServer, "events", STREAM)
    with HTTPServer(("127.0.0.1", 0), FakeServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_streamed_equals_plain(url: str) -> None:
    plain, streamed = (ask(url, chat_request(["hello"], stream=stream)) for stream in (False, True))
    assert plain == streamed
    assert (plain.token_ids, plain.logprobs, plain.text) == (tuple(TOKENS), tuple(LOGPROBS), "abc")


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_status(url: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "status", 400)
    with pytest.raises(ChatError, match="HTTP 400") as caught:
        ask(url, chat_request(["hello"], stream=stream))
    assert caught.value.status == 400


@pytest.mark.parametrize("tail", [[json.dumps({"error": {"message": "lost"}}), "[DONE]"], []])
def test_a_stream_that_breaks_is_no_answer(url: str, tail: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "events", [*STREAM[:2], *tail])
    with pytest.raises(ChatError, match="HTTP 200"):
        ask(url, chat_request(["hello"], stream=True))


def test_parts_keep_their_order() -> None:
    photo = photos()["coffee.jpg"]
    content = chat_request(["before", photo, "after"])["messages"][0]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "text"]
    assert content[1]["image_url"]["url"] == photo.data_url


def test_each_modality_has_its_form() -> None:
    video, sound = videos()["coffee-pan.mp4"], sounds()["chirp.wav"]
    shown, heard = chat_request([video, sound])["messages"][0]["content"]
    assert shown == {"type": "video_url", "video_url": {"url": video.data_url}}
    assert heard["type"] == "input_audio"
    assert heard["input_audio"]["format"] == "wav"
    assert base64.b64decode(heard["input_audio"]["data"]) == sound.data


def test_overrides_win() -> None:
    assert chat_request(["hello"], max_tokens=2)["max_tokens"] == 2
