"""What a gateway of one's own does: a real client against a real server, whose device is a small function."""

import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest

from consumer_shim.client import AsyncProducer
from consumer_shim.gateway import encode_request
from consumer_shim.rewrite import RequestError
from consumer_shim.tickets import from_params
from tests.integration.rig import WAIT_S, Rig
from tests.kit.ports import free_port


@pytest.fixture
async def producer(rig: Rig) -> AsyncIterator[AsyncProducer]:
    producer = AsyncProducer(rig.address)
    yield producer
    await producer.close()


def chat(*urls: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "m", "messages": [{"role": "user", "content": [*images, {"type": "text", "text": "?"}]}]}


PHOTO = "data:image/png;base64,cGhvdG8="
BAD = "data:image/png;base64,YmFk"


async def test_a_request_gets_its_tickets(rig: Rig, producer: AsyncProducer) -> None:
    request = chat(PHOTO, PHOTO)
    tickets = await encode_request(request, producer, WAIT_S)
    assert [ticket.key for ticket in tickets] == [pull.key for pull in from_params(request["ec_transfer_params"])]
    assert {pull.address for pull in from_params(request["ec_transfer_params"])} == {rig.address}
    assert request["messages"][0]["content"][0]["uuid"] == tickets[0].key
    assert await rig.fetch(tickets[0])


async def test_a_request_without_media_stays(producer: AsyncProducer) -> None:
    request = chat()
    assert await encode_request(request, producer, WAIT_S) == []
    assert request == chat()


async def test_a_refused_request_stays_and_holds_nothing(rig: Rig, producer: AsyncProducer) -> None:
    request = chat(PHOTO, BAD)
    before = copy.deepcopy(request)
    with pytest.raises(RequestError, match="image 2 of 2: the image cannot be decoded") as refused:
        await encode_request(request, producer, WAIT_S)
    assert refused.value.status == 400
    assert request == before
    assert rig.pool.num_leases == 0


async def test_a_producer_that_is_not_there_is_told(rig: Rig) -> None:
    producer = AsyncProducer(f"127.0.0.1:{free_port()}")
    with pytest.raises(RequestError, match=r"encoding at .* failed") as refused:
        await encode_request(chat(PHOTO), producer, WAIT_S)
    assert refused.value.status == 503
    await producer.close()
    with pytest.raises(RequestError):
        await encode_request(chat(PHOTO), producer, WAIT_S)
