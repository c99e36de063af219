"""What a client sees when an embedding cannot be had: a clear error in seconds, and an engine that lives on."""

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from consumer_shim.client import Producer, ProducerError
from consumer_shim.tickets import PullTicket, to_params
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.e2e.conftest import Servers
from tests.kit.chat import ChatError, ask, chat_request
from tests.kit.photos import photos
from tests.kit.servers import ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

pytestmark = pytest.mark.e2e

POOL = "1MiB"
PULL_TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def small_producer(model: Path, stack: Stack) -> Iterator[ProducerServer]:
    """One of our own, to be killed and started again, with a pool that a few pictures fill."""
    server = ProducerServer(model, extra_args=("--pool-bytes", POOL), name="e2e-small")
    stack.start(server)
    stack.wait_ready(print)
    yield server
    stack.stop(server)


@pytest.fixture(scope="module")
def llm_only(model: Path, stack: Stack, small_producer: ProducerServer) -> Iterator[VllmServer]:
    server = VllmServer(model, extra_args=consumer_args(small_producer.address, "auto"), name="e2e-auto")
    stack.start(server)
    stack.wait_ready(print)
    yield server
    stack.stop(server)


def encode(address: str, data: bytes) -> tuple[pb.Ticket, PullTicket]:
    producer = Producer(address)
    (ticket,) = producer.encode([pb.MediaItem(modality=pb.MODALITY_IMAGE, data=data)], 60)
    producer.close()
    assert not isinstance(ticket, ProducerError)
    return ticket, PullTicket.from_message(ticket, address)


def request_with(ticket: pb.Ticket, pull: PullTicket, **overrides: Any) -> dict[str, Any]:
    """A chat request that carries a ticket itself, as a gateway of one's own would send it."""
    request = chat_request(["What is it?"], ec_transfer_params=to_params([pull]), **overrides)
    part = json.loads(ticket.content_part) | {"uuid": pull.key}
    request["messages"][0]["content"].insert(0, part)
    return request


def refusal(url: str, request: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=request, timeout=60, trust_env=False)


def drawing(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (224, 224), (colour, 255 - colour, colour)).save(file, "PNG")
    return file.getvalue()


WRONG = {
    "rows": ({"num_rows": 65}, "rows 65, expected 64"),
    "width": ({"width": 64}, "64, expected 128"),
    "dtype": ({"dtype": "float32"}, "float32, expected bfloat16"),
    "producer": ({"address": "127.0.0.1:1"}, "not configured with"),
    "epoch": ({"epoch": "0" * 16}, "EPOCH_MISMATCH"),
    "key": ({"key": "0" * 64}, "NOT_IN_POOL"),
    "lease": ({"lease_id": "no lease"}, "lease_id"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_ticket_fails_its_request_only(
    servers: Servers, llm_only: VllmServer, small_producer: ProducerServer, name: str, stream: bool
) -> None:
    """Each difference is named, and the next request is answered as plain vLLM answers it."""
    change, said = WRONG[name]
    ticket, pull = encode(small_producer.address, drawing(list(WRONG).index(name) + 100 * stream))
    answer = refusal(llm_only.url, request_with(ticket, replace_unchecked(pull, **change), stream=stream))
    assert 400 <= answer.status_code < 600
    assert said in answer.json()["error"]["message"]
    good = chat_request([photos()["coffee.jpg"], "What is it?"])
    assert ask(llm_only.url, good) == ask(servers.plain.url, good)


def replace_unchecked(pull: PullTicket, **change: Any) -> PullTicket:
    """As dataclasses.replace, but a malformed ticket can be made too."""
    changed = object.__new__(PullTicket)
    for name, value in {**asdict(pull), **change}.items():
        object.__setattr__(changed, name, value)
    return changed


def test_a_bad_image_is_refused_by_its_number(llm_only: VllmServer) -> None:
    photo = photos()["coffee.jpg"]
    broken = replace(photo, data=photo.data[: len(photo.data) // 2])
    with pytest.raises(ChatError, match=r"image 2 of 2: the image cannot be decoded") as refused:
        ask(llm_only.url, chat_request([photo, broken, "What is it?"]))
    assert refused.value.status == 400


def test_an_evicted_embedding_fails_clearly(llm_only: VllmServer, small_producer: ProducerServer) -> None:
    ticket, pull = encode(small_producer.address, drawing(7))
    producer = Producer(small_producer.address)
    producer.release(ticket.lease_id, 10)
    pictures = [pb.MediaItem(modality=pb.MODALITY_IMAGE, data=drawing(colour)) for colour in range(20, 220)]
    for start in range(0, len(pictures), 20):
        for other in producer.encode(pictures[start : start + 20], 60):
            assert not isinstance(other, ProducerError)
            producer.release(other.lease_id, 10)
    producer.close()
    answer = refusal(llm_only.url, request_with(ticket, pull))
    assert answer.status_code == 503
    assert "NOT_IN_POOL" in answer.json()["error"]["message"]


def test_a_killed_and_a_restarted_producer_fail_clearly(
    model: Path, stack: Stack, servers: Servers, llm_only: VllmServer, small_producer: ProducerServer
) -> None:
    """The last of this file: it leaves another producer at the same address."""
    ticket, pull = encode(small_producer.address, drawing(9))
    small_producer.kill()
    for request in (request_with(ticket, pull), chat_request([photos()["coffee.jpg"], "What is it?"])):
        answer = refusal(llm_only.url, request)
        assert answer.status_code == 503
        assert "UNAVAILABLE" in answer.json()["error"]["message"] or "failed" in answer.json()["error"]["message"]
    port = int(small_producer.address.rpartition(":")[2])
    again = ProducerServer(model, extra_args=("--pool-bytes", POOL), name="e2e-again", port=port)
    stack.start(again)
    stack.wait_ready(print)
    try:
        answer = refusal(llm_only.url, request_with(ticket, pull))
        assert answer.status_code == 503
        assert "EPOCH_MISMATCH" in answer.json()["error"]["message"]
        good = chat_request([photos()["coffee.jpg"], "And now?"])
        assert ask(llm_only.url, good) == ask(servers.plain.url, good)
    finally:
        stack.stop(again)
