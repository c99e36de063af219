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
from tests.kit.photos import photos
from tests.kit.servers import ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REPOSITORY = Path(__file__).parents[2]
ENGINE = ("--gpu-memory-utilization", "0.1", "--attention-backend", "TRITON_ATTN")
ENCODER = ("--mm-encoder-attn-backend", "TORCH_SDPA")
LIBRARIES = {"nixl": ("nixl_cu13", "nixl_cu12"), "mooncake": ("mooncake",)}
TRANSPORTS = ("grpc", "shm", *(one for one, names in LIBRARIES.items() if any(map(importlib.util.find_spec, names))))
COMMANDS = {"vllm": "vllm.entrypoints.cli.main", "ec-producer": "producer.cli"}
SCRIPT = """#!{python}
import sys
from {module} import main
if __name__ == "__main__":
    sys.exit(main())
"""
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`vllm` and `ec-producer` for this interpreter, whether or not they are installed as commands."""
    folder = tmp_path_factory.mktemp("bin")
    for name, module in COMMANDS.items():
        script = folder / name
        script.write_text(SCRIPT.format(python=sys.executable, module=module))
        script.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


def conversations() -> dict[str, list[Part]]:
    photo = photos()
    return {
        "jpeg": [photo["coffee.jpg"], "What is it?"],
        "png": ["Look:", photo["chelsea.png"], "What is it?"],
        "two": [photo["rocket.jpg"], "and", photo["astronaut.png"], "How do they differ?"],
        "twice the same": [photo["retina.png"], photo["retina.png"], "Are they equal?"],
    }


def answers(stack: Stack, commands: Path, name: str, extra_args: tuple[str, ...]) -> dict[str, Answer]:
    model = cached_checkpoint("qwen2_5_vl")
    server = VllmServer(model, extra_args=(*ENGINE, *extra_args), env=ENVIRONMENT, name=name, bin_dir=commands)
    stack.start(server)
    stack.wait_ready(print)
    try:
        return {one: ask(server.url, chat_request(parts)) for one, parts in conversations().items()}
    finally:
        stack.stop(server)


def test_tokens_and_logprobs_equal_plain_vllms(stack: Stack, commands: Path) -> None:
    producer = ProducerServer(
        cached_checkpoint("qwen2_5_vl"),
        transports=TRANSPORTS,
        extra_args=("--mm-encoder-attn-backend", "TORCH_SDPA"),
        env=ENVIRONMENT,
        bin_dir=commands,
        name="gpu-producer",
    )
    stack.start(producer)
    expected = answers(stack, commands, "gpu-plain", ENCODER)
    found = {
        transport: answers(stack, commands, f"gpu-{transport}", tuple(consumer_args(producer.address, transport)))
        for transport in TRANSPORTS
    }
    pulls = {one: producer.metric("ec_producer_pulls_total", transport=one) for one in TRANSPORTS}
    if report := os.environ.get("EC_PRODUCER_REPORT"):
        equal = sum(found[one][name] == expected[name] for one in TRANSPORTS for name in expected)
        figures = {"cases": len(TRANSPORTS) * len(expected), "identical": equal, "pulls": pulls}
        Path(report).write_text(json.dumps(figures, indent=1))
    assert all(pulls.values())
    for transport in TRANSPORTS:
        assert found[transport] == expected
