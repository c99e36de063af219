"""A stock vLLM consumer, without the shim, reads the files that the producer leaves for it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from consumer_shim.client import Producer, ProducerError
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.e2e.conftest import Servers
from tests.kit.chat import ask, chat_request
from tests.kit.photos import photos
from tests.kit.servers import ProducerServer, VllmServer
from tests.kit.stack import Stack

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def tickets(model: Path, folder: Path) -> dict[str, pb.Ticket]:
    """Three pictures whose files are there, by a producer that has ended."""
    names = ("coffee.jpg", "chelsea.png", "rocket.jpg")
    with ProducerServer(model, extra_args=("--publish-files", str(folder)), name="e2e-files-producer") as server:
        client = Producer(server.address)
        items = [pb.MediaItem(modality=pb.MODALITY_IMAGE, data=photos()[name].data) for name in names]
        found = client.encode(items, 60)
        client.close()
    return {name: one for name, one in zip(names, found, strict=True) if not isinstance(one, ProducerError)}


@pytest.fixture(scope="module")
def stock(model: Path, stack: Stack, folder: Path, tickets: dict[str, pb.Ticket]) -> Iterator[VllmServer]:
    transfer = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    server = VllmServer(model, extra_args=("--ec-transfer-config", json.dumps(transfer)), name="e2e-stock")
    stack.start(server)
    stack.wait_ready(print)
    yield server
    stack.stop(server)


def spoil(folder: Path, name: str) -> None:
    """Noise of the same shape and spread, in the place of an embedding."""
    path = folder / name / "encoder_cache.safetensors"
    real = load_file(path)["ec_cache"]
    noise = torch.randn(real.shape, generator=torch.Generator().manual_seed(7)) * real.float().std()
    save_file({"ec_cache": noise.to(real.dtype)}, path)


def test_a_request_with_its_image(
    servers: Servers, stock: VllmServer, folder: Path, tickets: dict[str, pb.Ticket]
) -> None:
    """The name of a file is vLLM's own hash: spoiling all but those of content keys changes the answer."""
    request = chat_request([photos()["coffee.jpg"], "What is it?"])
    expected = ask(servers.plain.url, request)
    assert ask(stock.url, request) == expected
    keys = {ticket.key for ticket in tickets.values()}
    others = {path.parent.name for path in folder.glob("*/*.safetensors")} - keys
    assert len(others) == len(tickets) + 4  # the producer's own test image and video have both names
    for name in others:
        spoil(folder, name)
    another = chat_request([photos()["chelsea.png"], "What is it?"])
    assert ask(stock.url, another).token_ids != ask(servers.plain.url, another).token_ids


def test_a_request_with_metadata_and_the_key(
    servers: Servers, stock: VllmServer, folder: Path, tickets: dict[str, pb.Ticket]
) -> None:
    request = chat_request([photos()["rocket.jpg"], "What is it?"])
    expected = ask(servers.plain.url, request)
    ticket = tickets["rocket.jpg"]
    request["messages"][0]["content"][0] = json.loads(ticket.content_part)
    assert ask(stock.url, request) == expected
