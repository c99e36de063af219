"""On a GPU: an LLM-only vLLM behind the shim answers as plain vLLM does, token for token, over each transport.

Three servers share the device one after the other, so each takes a small part of its memory.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kit.chat import Answer, Part, ask, chat_request
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.clips import videos
from tests.kit.models import FAMILIES
from tests.kit.photos import photos
from tests.kit.servers import ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REPOSITORY = Path(__file__).parents[2]
ENGINE = ("--gpu-memory-utilization", "0.1", "--attention-backend", "TRITON_ATTN")
ENCODER = ("--mm-encoder-attn-backend", "TORCH_SDPA")
LIBRARIES = {"nixl": ("nixl_cu13", "nixl_cu12"), "mooncake": ("mooncake",)}
TRANSPORTS = ("grpc", "shm", *(one for one, names in LIBRARIES.items() if any(map(importlib.util.find_spec, names))))
CASES = {"qwen2_5_vl": TRANSPORTS, "qwen3_vl": ("grpc",), "internvl": ("shm",), "gemma3": ("grpc",)}
COMMANDS = {"vllm": "vllm.entrypoints.cli.main", "ec-producer": "producer.cli"}
SCRIPT = """#!{python}
import sys
from {module} import main
if __name__ == "__main__":
    sys.exit(main())
"""
ENTRY_POINTS = """[vllm.general_plugins]
ec_producer = consumer_shim.plugin:register
"""
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`vllm` and `ec-producer` for this interpreter, and the plugin, whether or not they are installed."""
    folder = tmp_path_factory.mktemp("bin")
    for name, module in COMMANDS.items():
        script = folder / name
        script.write_text(SCRIPT.format(python=sys.executable, module=module))
        script.chmod(0o755)
    info = folder / "ec_producer-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ec-producer\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def environment(commands: Path) -> dict[str, str]:
    path = [str(commands), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


def conversations(family: str) -> dict[str, list[Part]]:
    photo, video = photos(), videos()
    found: dict[str, list[Part]] = {
        "jpeg": [photo["coffee.jpg"], "What is it?"],
        "png": ["Look:", photo["chelsea.png"], "What is it?"],
        "two": [photo["rocket.jpg"], "and", photo["astronaut.png"], "How do they differ?"],
        "twice the same": [photo["retina.png"], photo["retina.png"], "Are they equal?"],
    }
    if "video" in FAMILIES[family].modalities:
        found["video"] = [video["coffee-pan.mp4"], "What happens?"]
        found["image and video"] = [photo["retina.jpg"], "then", video["rocket-zoom.mp4"], "Which is longer?"]
    return found


def answers(stack: Stack, commands: Path, family: str, name: str, extra_args: tuple[str, ...]) -> dict[str, Answer]:
    model = cached_checkpoint(family)
    server = VllmServer(
        model, extra_args=(*ENGINE, *extra_args), env=environment(commands), name=name, bin_dir=commands
    )
    stack.start(server)
    stack.wait_ready(print)
    try:
        return {one: ask(server.url, chat_request(parts)) for one, parts in conversations(family).items()}
    finally:
        stack.stop(server)


@pytest.mark.parametrize("family", CASES)
def test_tokens_and_logprobs_equal_plain_vllms(stack: Stack, commands: Path, family: str) -> None:
    producer = ProducerServer(
        cached_checkpoint(family),
        transports=CASES[family],
        extra_args=("--mm-encoder-attn-backend", "TORCH_SDPA"),
        env=environment(commands),
        bin_dir=commands,
        name=f"gpu-{family}-producer",
    )
    stack.start(producer)
    expected = answers(stack, commands, family, f"gpu-{family}-plain", ENCODER)
    found: dict[str, dict[str, Answer]] = {}
    for transport in CASES[family]:
        flags = consumer_args(producer.address, transport, without=FAMILIES[family].without_encoder)
        found[transport] = answers(stack, commands, family, f"gpu-{family}-{transport}", tuple(flags))
    pulls = {one: producer.metric_reaching(1, "ec_producer_pulls_total", transport=one) for one in CASES[family]}
    stack.stop(producer)
    equal = {one: [name for name in expected if found[one][name] == expected[name]] for one in found}
    if folder := os.environ.get("EC_PRODUCER_REPORT"):
        figures = {"family": family, "cases": list(expected), "identical": equal, "pulls": pulls}
        Path(folder, f"{family}.json").write_text(json.dumps(figures, indent=1))
    assert all(pulls.values())
    assert found == dict.fromkeys(found, expected)
