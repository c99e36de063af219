"""Each model family: an LLM-only vLLM behind the shim answers as plain vLLM does, and noise changes what it says."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import REPOSITORY
from tests.kit.chat import Part, ask, chat_request
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.clips import sounds, videos
from tests.kit.noise_connector import SWITCH
from tests.kit.photos import photos
from tests.kit.servers import NOISE_CONNECTOR, ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

pytestmark = pytest.mark.e2e


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    transport: str
    modalities: tuple[str, ...]
    without: tuple[str, ...] = ("image", "video")
    """Modalities that the LLM-only server loads no encoder for; those by stand-in image need theirs."""


FAMILIES = (
    Family("qwen2_vl", "shm", ("image", "video")),
    Family("qwen3_vl", "nixl", ("image", "video")),
    Family("qwen3_5", "mooncake", ("image", "video")),
    Family("exaone4_5", "grpc", ("image", "video")),
    Family("minicpm_v4_6", "shm", ("image", "video")),
    Family("internvl", "nixl", ("image",)),
    Family("gemma3", "mooncake", ("image",), without=()),
    Family("smolvlm", "grpc", ("image",), without=()),
    Family("idefics3", "shm", ("image",), without=()),
    Family("qwen2_audio", "nixl", ("audio",), without=("audio",)),
)


@dataclass(frozen=True, slots=True)
class Servers:
    family: Family
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


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    family: Family = request.param
    model = cached_checkpoint(family.name)
    switch = tmp_path_factory.mktemp("noise") / "on"
    with Stack() as stack:
        producer = ProducerServer(model, transports=[family.transport], name=f"{family.name}-producer")
        plain = VllmServer(model, name=f"{family.name}-plain")
        flags = consumer_args(producer.address, family.transport, connector=NOISE_CONNECTOR, without=family.without)
        env = {"PYTHONPATH": str(REPOSITORY), SWITCH: str(switch)}
        llm_only = VllmServer(model, extra_args=flags, env=env, name=f"{family.name}-llm-only")
        for service in (producer, plain, llm_only):
            stack.start(service)
        stack.wait_ready(print)
        yield Servers(family, producer, plain, llm_only, switch)


def conversations(family: Family) -> dict[str, list[Part]]:
    photo, video, sound = photos(), videos(), sounds()
    found: dict[str, list[Part]] = {}
    if "image" in family.modalities:
        found["image"] = ["Look:", photo["coffee.jpg"], "What is it?"]
        found["two images"] = [photo["astronaut.png"], "and", photo["rocket.jpg"], "How do they differ?"]
    if "video" in family.modalities:
        found["video"] = [video["coffee-pan.mp4"], "What happens?"]
        found["image and videos"] = [
            *(photo["retina.png"], video["rocket-zoom.mp4"], "then", video["coffee-pan.mp4"], "Which is shorter?"),
        ]
    if "audio" in family.modalities:
        found["audio"] = ["Listen:", sound["chirp.wav"], "What is it?"]
        found["two sounds"] = [sound["chirp.wav"], "and", sound["chirp.wav"], "Are they equal?"]
    return found


def unseen(family: Family) -> list[Part]:
    """A conversation about what no other one shows."""
    return [photos()["chelsea.png"] if "image" in family.modalities else sounds()["vowels.wav"], "What is it?"]


def test_tokens_and_logprobs_equal_plain_vllms(servers: Servers) -> None:
    pulled = {"transport": servers.family.transport}
    for name, parts in conversations(servers.family).items():
        pulls = servers.producer.metric("ec_producer_pulls_total", **pulled)
        expected = ask(servers.plain.url, chat_request(parts))
        assert ask(servers.llm_only.url, chat_request(parts)) == expected, name
        assert len(expected.token_ids) == len(expected.logprobs) == 24
        assert servers.producer.metric("ec_producer_pulls_total", **pulled) > pulls, name


def test_noise_instead_of_the_embedding_changes_the_answer(servers: Servers) -> None:
    request = chat_request(unseen(servers.family))
    with servers.noise():
        assert ask(servers.llm_only.url, request).token_ids != ask(servers.plain.url, request).token_ids
