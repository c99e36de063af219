"""Each model family: an LLM-only vLLM behind the shim answers as plain vLLM does, and noise changes what it says."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.chat import Part, ask, chat_request
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.clips import pan_at, sounds, videos
from tests.kit.models import FAMILIES
from tests.kit.photos import photos
from tests.kit.servers import NOISE_CONNECTOR, NOISE_SWITCH, ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
TRANSPORTS = ("shm", "nixl", "mooncake", "grpc")
OTHERS = [name for name in FAMILIES if name != "qwen2_5_vl"]  # which `tests/e2e` is about
CASES = {name: TRANSPORTS[place % len(TRANSPORTS)] for place, name in enumerate(OTHERS)}


@dataclass(frozen=True, slots=True)
class Servers:
    modalities: tuple[str, ...]
    transport: str
    producer: ProducerServer
    plain: VllmServer
    llm_only: VllmServer
    switch: Path

    @contextmanager
    def noise(self) -> Iterator[None]:
        """While it lasts, embeddings that the LLM-only server loads are noise."""
        self.switch.touch()
        yield
        self.switch.unlink()


@pytest.fixture(scope="module", params=CASES)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    name: str = request.param
    family, transport, model = FAMILIES[name], CASES[name], cached_checkpoint(name)
    switch = tmp_path_factory.mktemp("noise") / "on"
    with Stack() as stack:
        producer = ProducerServer(model, transports=[transport], name=f"{name}-producer")
        plain = VllmServer(model, name=f"{name}-plain")
        flags = consumer_args(producer.address, transport, connector=NOISE_CONNECTOR, without=family.without_encoder)
        env = {"PYTHONPATH": str(REPOSITORY), NOISE_SWITCH: str(switch)}
        llm_only = VllmServer(model, extra_args=flags, env=env, name=f"{name}-llm-only")
        for service in (producer, plain, llm_only):
            stack.start(service)
        stack.wait_ready(print)
        yield Servers(family.modalities, transport, producer, plain, llm_only, switch)


def conversations(modalities: tuple[str, ...]) -> dict[str, list[Part]]:
    photo, video, sound = photos(), videos(), sounds()
    found: dict[str, list[Part]] = {}
    if "image" in modalities:
        found["image"] = ["Look:", photo["coffee.jpg"], "What is it?"]
        found["two images"] = [photo["astronaut.png"], "and", photo["rocket.jpg"], "How do they differ?"]
    if "video" in modalities:
        pan, zoom = video["coffee-pan.mp4"], video["rocket-zoom.mp4"]
        found["video"] = [pan, "What happens?"]
        found["image and videos"] = [photo["retina.png"], zoom, "then", pan, "Which is shorter?"]
    if "audio" in modalities:
        chirp = sound["chirp.wav"]
        found["sound"] = ["Listen:", chirp, "What is it?"]
        found["the same twice"] = [chirp, "and", chirp, "Are they equal?"]
    return found


def test_tokens_and_logprobs_equal_plain_vllms(servers: Servers) -> None:
    for name, parts in conversations(servers.modalities).items():
        expected = ask(servers.plain.url, chat_request(parts))
        assert ask(servers.llm_only.url, chat_request(parts)) == expected, name
        assert len(expected.token_ids) == len(expected.logprobs) == 24
    assert servers.producer.metric_reaching(1, "ec_producer_pulls_total", transport=servers.transport) > 0


def test_noise_instead_of_an_embedding_changes_the_answer(servers: Servers) -> None:
    """Of each modality, an item that nothing else is asked about, since vLLM keeps what it has."""
    unseen = {"image": photos()["chelsea.png"], "video": pan_at(3.0), "audio": sounds()["vowels.wav"]}
    for modality in servers.modalities:
        request = chat_request([unseen[modality], "What is it?"])
        with servers.noise():
            noisy = ask(servers.llm_only.url, request)
        assert noisy.token_ids != ask(servers.plain.url, request).token_ids, modality
