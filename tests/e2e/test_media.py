"""Hostile and odd files at a real producer: vLLM's own embeddings, or a refusal where plain vLLM refuses, too."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from consumer_shim.client import Producer, ProducerError
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.e2e.conftest import Servers
from tests.kit.chat import ask, chat_request
from tests.kit.clips import Video
from tests.kit.hostile import ACCEPTED, Case, cases
from tests.kit.photos import Photo, photos
from tests.kit.reference import reference_embeddings

pytestmark = pytest.mark.e2e

KINDS = {"image": Photo, "video": Video}
LONGER = ("image/png-100000000-pixels",)
"""More rows than the servers' context takes; `tests/integration` has it."""


def request_of(case: Case) -> dict[str, Any]:
    media = KINDS[case.modality](name=case.name, mime=f"{case.modality}/any", data=case.data)
    return chat_request([media, "What is it?"], max_tokens=1)


def status_of(url: str, case: Case) -> int:
    return httpx.post(f"{url}/v1/chat/completions", json=request_of(case), timeout=60, trust_env=False).status_code


def test_odd_pictures_have_the_embeddings_that_vllm_computes(model: Path, servers: Servers) -> None:
    odd = {
        name: case.data
        for name, case in cases().items()
        if case.modality == "image" and case.outcome == ACCEPTED and name not in LONGER
    }
    producer = Producer(servers.producer.address)
    different = []
    for (name, data), expected in zip(odd.items(), reference_embeddings(model, list(odd.values())), strict=True):
        (ticket,) = producer.encode([pb.MediaItem(modality=pb.MODALITY_IMAGE, data=data)], 60)
        assert not isinstance(ticket, ProducerError), (name, ticket)
        rows = torch.frombuffer(bytearray(producer.fetch(ticket, 60)), dtype=torch.bfloat16)
        if not torch.equal(rows.view(ticket.num_rows, ticket.width), expected):
            different.append(name)
    producer.close()
    assert different == []


def test_what_is_refused_is_refused_by_plain_vllm_unless_the_table_says_why(servers: Servers) -> None:
    found = {}
    for name, case in cases().items():
        if case.modality in KINDS and case.outcome != ACCEPTED:
            plain = 400 if case.stricter else status_of(servers.plain.url, case)
            found[name] = (plain >= 400, status_of(servers.llm_only["grpc"].url, case))
    assert {name: outcome for name, outcome in found.items() if outcome != (True, 400)} == {}
    request = chat_request([photos()["coffee.jpg"], "What is it?"])
    assert ask(servers.llm_only["grpc"].url, request) == ask(servers.plain.url, request)
