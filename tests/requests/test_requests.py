"""The forms that requests come in, each answered as plain vLLM answers it or refused by name.

Both servers take small batches (so that prompts and images are longer than one), keep prefixes, parse tool calls, fetch
from this host only, and decode and process media under settings that the producer has too.
"""

import base64
import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from consumer_shim.client import AsyncProducer, Producer
from consumer_shim.gateway import encode_request
from consumer_shim.rewrite import RequestError
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.kit.chat import ChatError, ask, chat_request
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.clips import pan_at, videos
from tests.kit.photos import half_clear, photos
from tests.kit.servers import ENGINE, ENVIRONMENT, ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
BACKGROUND = (0, 128, 255)
MEDIA_IO = {"image": {"rgba_background_color": BACKGROUND}, "video": {"num_frames": 8}}
PROCESSOR = {"size": {"shortest_edge": 4 * 28**2, "longest_edge": 32 * 28**2}}
SETTINGS = ("--media-io-kwargs", json.dumps(MEDIA_IO), "--mm-processor-kwargs", json.dumps(PROCESSOR))
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
BATCH_TOKENS = 32  # as many as the largest image has rows under PROCESSOR

Pair = tuple[VllmServer, VllmServer]
"""Plain vLLM and an LLM-only one."""


@pytest.fixture(scope="module")
def model() -> Path:
    return cached_checkpoint("qwen2_5_vl")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs that servers may read, and that are served over HTTP."""
    folder = tmp_path_factory.mktemp("media")
    for name in ("coffee.jpg", "rocket.png"):
        (folder / name).write_bytes(photos()[name].data)
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def producer(model: Path, stack: Stack) -> ProducerServer:
    server = ProducerServer(model, extra_args=SETTINGS, name="requests-producer")
    stack.start(server)
    return server


@pytest.fixture(scope="module")
def pair(model: Path, stack: Stack, producer: ProducerServer, folder: Path) -> Pair:
    flags = [
        *("--max-num-batched-tokens", str(BATCH_TOKENS), "--enable-prefix-caching"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *SETTINGS,
        *("--allowed-media-domains", "127.0.0.1", "--allowed-local-media-path", str(folder)),
    ]
    plain = VllmServer(model, extra_args=flags, name="requests-plain")
    shim = consumer_args(producer.address, "auto")
    llm_only = VllmServer(model, extra_args=[*flags, *shim], name="requests-llm-only")
    stack.start(plain)
    stack.start(llm_only)
    stack.wait_ready(print)
    return plain, llm_only


def post(server: VllmServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120, trust_env=False)


def both(pair: Pair, request: dict[str, Any]) -> None:
    """Both answer alike."""
    plain, llm_only = pair
    assert ask(llm_only.url, request) == ask(plain.url, request)


def choices(server: VllmServer, request: dict[str, Any]) -> list[Any]:
    response = post(server, "/v1/chat/completions", request)
    assert response.status_code == 200, response.text
    return [(choice["message"]["content"], choice.get("token_ids")) for choice in response.json()["choices"]]


def url_request(url: str, **part: Any) -> dict[str, Any]:
    request = chat_request(["What is it?"])
    request["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": url}, **part})
    return request


# Media


def test_items_in_any_order_the_same_twice_and_text_between(pair: Pair) -> None:
    photo, video = photos(), videos()["rocket-zoom.mp4"]
    parts = [video, "then", photo["retina.png"], photo["coffee.png"], "and again", photo["retina.png"], video, "Well?"]
    both(pair, chat_request(parts))


def test_several_turns(pair: Pair) -> None:
    request = chat_request([photos()["coffee.jpg"], "What is it?"])
    answer = {"role": "assistant", "content": "A cup."}
    request["messages"] += [answer, *chat_request(["And", photos()["chelsea.jpg"], "?"])["messages"]]
    both(pair, request)


@pytest.mark.parametrize("fps", [0.5, 1.0, 2.0])
def test_a_videos_frame_rate_counts(pair: Pair, fps: float) -> None:
    both(pair, chat_request([pan_at(fps), "What happens?"]))


def test_frame_rates_make_another_answer(pair: Pair) -> None:
    """Or the test before this one would prove nothing."""
    answers = {ask(pair[0].url, chat_request([pan_at(fps), "What happens?"])) for fps in (0.5, 1.0, 2.0)}
    assert len(answers) == 3


def test_settings_for_media_are_the_servers(pair: Pair) -> None:
    """A picture that is half clear, on the background that both sides are told; a white one gives another answer."""
    both(pair, chat_request([half_clear(), "What is it?"]))
    blue, white = (half_clear(color) for color in (BACKGROUND, (255, 255, 255)))
    answers = [ask(pair[1].url, chat_request([photo, "What is it?"])) for photo in (half_clear(), blue, white)]
    assert answers[0] == answers[1] != answers[2]


def test_settings_of_the_processor_are_the_servers(pair: Pair, producer: ProducerServer) -> None:
    """Of 64 rows without them, 32 are left."""
    both(pair, chat_request([photos()["chelsea.png"], "What is it?"]))
    client = Producer(producer.address)
    (ticket,) = client.encode([pb.MediaItem(modality=pb.MODALITY_IMAGE, data=photos()["chelsea.png"].data)], 60)
    client.close()
    assert isinstance(ticket, pb.Ticket)
    assert 24 <= ticket.num_rows <= 32


async def test_other_settings_are_refused_by_name(producer: ProducerServer) -> None:
    client = AsyncProducer(producer.address)
    request = chat_request([photos()["coffee.jpg"]])
    with pytest.raises(RequestError, match=r'media_io_kwargs is \{"image": .* at the encoder service and \{\} at its'):
        await encode_request(request, client, 60, settings={"media_io_kwargs": {}})
    with pytest.raises(
        RequestError, match=r'mm_processor_kwargs is \{"size": .* at the encoder service and \{\} at its'
    ):
        await encode_request(request, client, 60, settings={"mm_processor_kwargs": None})
    await encode_request(request, client, 60, settings={"media_io_kwargs": MEDIA_IO, "mm_processor_kwargs": PROCESSOR})
    await client.close()


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
def test_settings_of_a_request_are_refused_by_name(pair: Pair, name: str) -> None:
    with pytest.raises(ChatError, match=f"{name} cannot be set by a request") as refused:
        ask(pair[1].url, chat_request([photos()["coffee.jpg"]], **{name: {"do_resize": False}}))
    assert refused.value.status == 400


def test_an_own_uuid_is_no_identity(pair: Pair) -> None:
    """vLLM takes one uuid for one picture; here the content decides."""
    plain, llm_only = pair
    for name in ("coffee.jpg", "rocket.png"):
        answer = ask(llm_only.url, url_request(photos()[name].data_url, uuid="mine"))
        assert answer == ask(plain.url, url_request(photos()[name].data_url))


def test_a_uuid_alone_is_refused(pair: Pair) -> None:
    request = chat_request(["What is it?"])
    request["messages"][0]["content"].append({"type": "image_url", "image_url": None, "uuid": "mine"})
    with pytest.raises(ChatError, match="media must come with each request") as refused:
        ask(pair[1].url, request)
    assert refused.value.status == 400


# URLs


def test_http_urls_are_fetched_under_vllms_rules(pair: Pair, site: str) -> None:
    both(pair, url_request(f"{site}/coffee.jpg"))


def test_files_are_read_under_vllms_rules(pair: Pair, folder: Path) -> None:
    both(pair, url_request(f"file://{folder}/rocket.png"))


@pytest.mark.parametrize(
    ("url", "status", "sentence"),
    [
        ("{site}/absent.jpg", 422, "HTTP 404"),
        ("http://localhost:1/x.jpg", 400, "must be from one of the allowed domains"),
        ("http://127.0.0.1:1/x.jpg", 502, "could not be fetched"),
        ("file:///etc/passwd", 400, "must be a subpath"),
        ("ftp://127.0.0.1/x.jpg", 400, "HTTP, data or file URL"),
    ],
)
def test_other_urls_are_refused(pair: Pair, site: str, url: str, status: int, sentence: str) -> None:
    with pytest.raises(ChatError, match=sentence) as refused:
        ask(pair[1].url, url_request(url.format(site=site)))
    assert refused.value.status == status


# Sampling


def test_several_choices(pair: Pair) -> None:
    """Of one likeliest token each, since a seed kills plain vLLM on a CPU when it cuts a prompt in two."""
    request = chat_request([photos()["astronaut.jpg"], "Who?"], n=3, temperature=1.0, top_k=1, logprobs=False)
    plain, llm_only = (choices(server, request) for server in pair)
    assert plain == llm_only
    assert len(plain) == 3


def test_beam_search_is_refused_under_settings_for_media(pair: Pair) -> None:
    """`tests/e2e` has it answered; here vLLM gives media other names than their uuid, and passes no tickets on."""
    request = chat_request([photos()["motorcycle_left.jpg"]], n=2, use_beam_search=True, max_tokens=6, logprobs=False)
    refused = post(pair[1], "/v1/chat/completions", request)
    assert refused.status_code == 400
    assert "use_beam_search is not served with media" in refused.text
    text = chat_request(["Hello"], n=2, use_beam_search=True, max_tokens=6, logprobs=False)
    assert choices(pair[1], text) == choices(pair[0], text)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_tools(pair: Pair, stream: bool) -> None:
    request = chat_request([photos()["coffee.png"], "What is it?"], tools=TOOLS, stream=stream)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    request["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a cup"},
    ]
    both(pair, request)


# Prefix cache, chunks


def test_a_prompt_longer_than_a_batch(pair: Pair) -> None:
    """Its image, too, has as many rows as a batch has tokens."""
    words = "word " * (2 * BATCH_TOKENS)
    both(pair, chat_request([words, photos()["astronaut.png"], words, photos()["coffee.png"], "?"]))


def test_a_cached_prefix_is_no_other_picture(pair: Pair) -> None:
    """Two pictures of one size behind one long text: a hit for what is equal, none for what is not."""
    text = "The same long beginning of both. " * 10
    for name in ("coffee.jpg", "coffee.png", "coffee.jpg"):
        both(pair, chat_request([text, photos()[name], "What is it? " * 20]))


# Other endpoints


def test_tokenize_counts_an_images_tokens(pair: Pair) -> None:
    body = {"model": "tiny", "messages": chat_request([photos()["rocket.jpg"], "What is it?"])["messages"]}
    plain, llm_only = (post(server, "/tokenize", body) for server in pair)
    assert plain.status_code == llm_only.status_code == 200, llm_only.text
    assert llm_only.json()["tokens"] == plain.json()["tokens"]


OTHERS = {
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]
    },
    "/v1/messages": {
        "max_tokens": 4,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}],
            }
        ],
    },
}


@pytest.mark.parametrize("path", OTHERS)
def test_media_elsewhere_are_refused_by_name(pair: Pair, path: str) -> None:
    refused = post(pair[1], path, {"model": "tiny", **OTHERS[path]})
    assert refused.status_code == 400
    assert path in refused.json()["error"]["message"]


def test_text_elsewhere_is_answered(pair: Pair) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for path, body in {"/v1/responses": {"input": "Hello"}, "/v1/messages": {"messages": messages}}.items():
        body |= {"model": "tiny", "max_tokens" if path == "/v1/messages" else "max_output_tokens": 4, "temperature": 0}
        plain, llm_only = (post(server, path, body) for server in pair)
        assert plain.status_code == llm_only.status_code == 200, llm_only.text
        key = "content" if path == "/v1/messages" else "output"
        texts = [_text(response.json()[key]) for response in (plain, llm_only)]
        assert texts[0] == texts[1]


def _text(content: list[dict[str, Any]]) -> list[str]:
    return [part.get("text") or _text(part.get("content") or []) for part in content]  # type: ignore[misc]


# Offline


OFFLINE = """
import base64, io, json, sys
from PIL import Image
from vllm import LLM, SamplingParams
from consumer_shim.offline import encode_chat

if __name__ == "__main__":
    model, address, settings, conversations = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:5])
    llm = LLM(model=model, **settings)
    for messages in conversations:
        for part in messages[0]["content"]:
            if part["type"] == "image_pil":
                part["image_pil"] = Image.open(io.BytesIO(base64.b64decode(part["image_pil"])))
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
        messages, params = encode_chat(messages, params, address, timeout_s=60)
        (output,) = llm.chat(messages, params, use_tqdm=False)
        print("TOKENS", json.dumps(list(output.outputs[0].token_ids)))
"""


def test_offline_with_files_and_decoded_images(
    model: Path, pair: Pair, producer: ProducerServer, tmp_path: Path
) -> None:
    """An `LLM` without an encoder; the second conversation brings pixels, which are those of a PNG."""
    photo = photos()
    conversations = [[photo["coffee.jpg"], "What is it?"], [photo["chelsea.png"], "What is it?"]]
    expected = [list(ask(pair[0].url, chat_request(parts)).token_ids) for parts in conversations]
    messages = [chat_request(parts)["messages"] for parts in conversations]
    pixels = base64.b64encode(photo["chelsea.png"].data).decode()
    messages[1][0]["content"][0] = {"type": "image_pil", "image_pil": pixels}
    transfer = json.loads(consumer_args(producer.address, "shm")[3])
    settings = ENGINE | {"limit_mm_per_prompt": {"image": 0, "video": 0}, "ec_transfer_config": transfer}
    settings |= {"max_num_batched_tokens": BATCH_TOKENS, "mm_processor_kwargs": PROCESSOR}
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    arguments = [str(model), producer.address, json.dumps(settings), json.dumps(messages)]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("TOKENS")]
    assert found == expected
