"""The product's claim: an LLM-only vLLM behind the shim answers as plain vLLM does, token for token."""

import base64
import io
import json
from pathlib import Path

import httpx
import pytest
import torch

from consumer_shim.client import Producer, ProducerError
from consumer_shim.metrics import DECLARATIONS
from producer.metrics import Metrics
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.e2e.conftest import REPOSITORY, TRANSPORTS, Servers
from tests.kit.chat import Part, ask, chat_request
from tests.kit.photos import photos
from tests.kit.reference import reference_embeddings
from tests.kit.samples import families, scraped, strangers
from tests.kit.servers import NOISE_CONNECTOR, VllmServer, consumer_args
from tests.kit.stack import Stack

pytestmark = pytest.mark.e2e

CONVERSATIONS = ("jpeg", "png", "two", "twice the same", "none")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tokens_and_logprobs_equal_plain_vllms(
    servers: Servers, conversations: dict[str, list[Part]], transport: str, name: str, stream: bool
) -> None:
    request = chat_request(conversations[name], stream=stream)
    expected = ask(servers.plain.url, request)
    answer = ask(servers.llm_only[transport].url, request)
    assert answer == expected
    assert len(answer.token_ids) == len(answer.logprobs) == 24


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_beam_search(servers: Servers, transport: str) -> None:
    """vLLM makes a request of its own for each step of a beam, with the media but without their tickets."""
    parts: list[Part] = [photos()["motorcycle_left.png"], "and", photos()["retina.jpg"], "What?"]
    body = chat_request(parts, n=2, use_beam_search=True, max_tokens=6, logprobs=False)
    plain, llm_only = (
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        for server in (servers.plain, servers.llm_only[transport])
    )
    assert plain.status_code == llm_only.status_code == 200, llm_only.text
    texts = [[choice["message"]["content"] for choice in one.json()["choices"]] for one in (plain, llm_only)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2


def test_each_transport_pulled(servers: Servers, conversations: dict[str, list[Part]]) -> None:
    """Prefix caching may spare a pull, so each server gets a picture that it has not seen."""
    for index, transport in enumerate(TRANSPORTS):
        before = servers.producer.metric("ec_producer_pulls_total", transport=transport)
        ask(servers.llm_only[transport].url, chat_request([f"New {index}.", photos()["motorcycle_left.jpg"]]))
        pulls = servers.producer.metric_reaching(before + 1, "ec_producer_pulls_total", transport=transport)
        assert pulls > before
        assert servers.producer.metric("ec_producer_pull_bytes_total", transport=transport) > 0
        _check_metrics(servers.llm_only[transport], transport)
    assert strangers(families(servers.producer.scrape()), Metrics.declarations()) == []


def _check_metrics(server: VllmServer, transport: str) -> None:
    """A request with a picture is in the shim's part of vLLM's `/metrics`, and nothing else is there."""
    assert server.metric_reaching(1, "ec_producer_shim_pulls_total", outcome="ok", transport=transport) >= 1
    text = server.scrape()
    pulls = scraped(text, "ec_producer_shim_pulls_total", outcome="ok")
    assert pulls == scraped(text, "ec_producer_shim_pull_seconds_count", transport=transport)
    assert scraped(text, "ec_producer_shim_pull_seconds_sum", transport=transport) > 0
    assert scraped(text, "ec_producer_shim_pull_bytes_total", transport=transport) > 1000 * pulls
    encodes = scraped(text, "ec_producer_shim_encodes_total", code="OK")
    assert 1 <= encodes <= scraped(text, "ec_producer_shim_encode_seconds_count")
    assert strangers(families(text), DECLARATIONS, ("model_name", "engine")) == []


def test_noise_instead_of_the_embedding_changes_the_answer(
    model: Path, stack: Stack, servers: Servers, conversations: dict[str, list[Part]]
) -> None:
    arguments = consumer_args(servers.producer.address, "grpc", connector=NOISE_CONNECTOR)
    noisy = VllmServer(model, extra_args=arguments, env={"PYTHONPATH": str(REPOSITORY)}, name="e2e-noise")
    stack.start(noisy)
    stack.wait_ready(print)
    try:
        for name in ("jpeg", "png", "two"):
            request = chat_request(conversations[name])
            assert ask(noisy.url, request).token_ids != ask(servers.plain.url, request).token_ids
        assert ask(noisy.url, chat_request(conversations["none"])) == ask(
            servers.plain.url, chat_request(conversations["none"])
        )
    finally:
        stack.stop(noisy)


def test_embeddings_equal_vllms_own_bit_for_bit(model: Path, servers: Servers) -> None:
    """Encoded together in one request here, each alone by vLLM's encoder-only instance."""
    files = [photo.data for photo in photos().values()]
    producer = Producer(servers.producer.address)
    tickets = producer.encode([pb.MediaItem(modality=pb.MODALITY_IMAGE, data=file) for file in files], 60)
    for ticket, expected in zip(tickets, reference_embeddings(model, files), strict=True):
        assert not isinstance(ticket, ProducerError)
        rows = torch.frombuffer(bytearray(producer.fetch(ticket, 60)), dtype=torch.bfloat16)
        assert torch.equal(rows.view(ticket.num_rows, ticket.width), expected)
    producer.close()


def test_in_band_embeddings_pass_untouched(servers: Servers) -> None:
    """vLLM's own form of a request that brings its embedding; the shim has no part in it."""
    producer = Producer(servers.producer.address)
    photo = photos()["coffee.jpg"]
    (ticket,) = producer.encode([pb.MediaItem(modality=pb.MODALITY_IMAGE, data=photo.data)], 60)
    assert not isinstance(ticket, ProducerError)
    rows = torch.frombuffer(bytearray(producer.fetch(ticket, 60)), dtype=torch.bfloat16)
    content_part = json.loads(ticket.content_part)
    file, grid = io.BytesIO(), io.BytesIO()
    torch.save(rows.view(ticket.num_rows, ticket.width), file)
    torch.save(torch.tensor(content_part["image_embeds"]["image_grid_thw"]), grid)
    embeds = {
        "image_embeds": base64.b64encode(file.getvalue()).decode(),
        "image_grid_thw": base64.b64encode(grid.getvalue()).decode(),
    }
    request = chat_request([photo, "What is it?"])
    in_band = json.loads(json.dumps(request))
    in_band["messages"][0]["content"][0] = {"type": "image_embeds", "image_embeds": embeds}
    assert ask(servers.llm_only["grpc"].url, in_band) == ask(servers.plain.url, request)
    producer.close()


@pytest.mark.parametrize(("path", "result"), [("/v1/completions", "choices"), ("/tokenize", "tokens")])
def test_other_endpoints_pass_untouched(servers: Servers, path: str, result: str) -> None:
    body = {"model": "tiny", "prompt": "Hello", "temperature": 0, "max_tokens": 4}
    plain, llm_only = (
        httpx.post(f"{server.url}{path}", json=body, trust_env=False).json()[result]
        for server in (servers.plain, servers.llm_only["grpc"])
    )
    assert plain == llm_only
