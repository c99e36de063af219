"""On a GPU: an LLM-only vLLM behind the shim answers as plain vLLM does, over each transport and in both modes.

All servers of a family share the device and start together. Each has a cache of its own size: vLLM's measuring takes
what others allocate meanwhile for its own.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.gpu.conftest import EndToEnd, Host
from tests.kit.chat import Answer, Part, ask, chat_request
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.clips import videos
from tests.kit.models import FAMILIES
from tests.kit.photos import photos
from tests.kit.servers import ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CACHE_BYTES = 256 << 20
ENGINE = (
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(CACHE_BYTES)),
    *("--attention-backend", "TRITON_ATTN"),
)
ENCODER = ("--mm-encoder-attn-backend", "FLASH_ATTN")
"""Of the producer and of plain vLLM alike; graphs cannot be captured with TORCH_SDPA."""
LIBRARIES = {"nixl": ("nixl_cu13", "nixl_cu12"), "mooncake": ("mooncake",)}
TRANSPORTS = ("grpc", "shm", *(one for one, names in LIBRARIES.items() if any(map(importlib.util.find_spec, names))))
LANGUAGE = {"qwen3_5": ("--gdn-prefill-backend", "triton")}
"""Of vLLM, by family: on Hopper it would compile FlashInfer's kernel for linear attention, which takes nvcc."""
CASES = {
    "qwen2_5_vl": TRANSPORTS,
    "qwen3_vl": ("grpc",),
    "qwen3_5": ("grpc",),
    "internvl": ("shm",),
    "gemma3": ("grpc",),
}
"""Transports by family; the first of them in `fast` mode too, which differs in the encoder only."""
MODES: dict[str, tuple[str, ...]] = {"exact": ("--fidelity", "exact"), "fast": ()}
"""Flags by mode; `fast` is what there is without any."""


@dataclass(frozen=True, slots=True)
class Servers:
    """All that a family needs; the consumers by mode and transport."""

    plain: VllmServer
    producers: Mapping[str, ProducerServer]
    consumers: Mapping[tuple[str, str], VllmServer]

    @classmethod
    def of(cls, family: str, host: Host) -> "Servers":
        """Not started yet."""
        model = cached_checkpoint(family)

        def vllm(name: str, *flags: str) -> VllmServer:
            arguments = (*ENGINE, *LANGUAGE.get(family, ()), *flags)
            return VllmServer(model, extra_args=arguments, env=host.env, bin_dir=host.bin_dir, name=f"gpu-{name}")

        producers = {
            mode: ProducerServer(
                model,
                transports=CASES[family],
                extra_args=(*ENCODER, *flags),
                env=host.env,
                bin_dir=host.bin_dir,
                name=f"gpu-{family}-{mode}",
            )
            for mode, flags in MODES.items()
        }
        without = FAMILIES[family].without_encoder
        consumers = {
            (mode, transport): vllm(
                f"{family}-{mode}-{transport}",
                *consumer_args(producers[mode].address, transport, without=without),
            )
            for mode, transport in pairs(family)
        }
        return cls(vllm(f"{family}-plain", *ENCODER), producers, consumers)

    def start(self, stack: Stack) -> None:
        """Returns when all of them answer."""
        for service in (self.plain, *self.producers.values(), *self.consumers.values()):
            stack.start(service)
        stack.wait_ready(print)


def pairs(family: str) -> list[tuple[str, str]]:
    """Mode and transport of each consumer."""
    return [*(("exact", transport) for transport in CASES[family]), ("fast", CASES[family][0])]


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


def answers(server: VllmServer, family: str) -> dict[str, Answer]:
    return {name: ask(server.url, chat_request(parts)) for name, parts in conversations(family).items()}


def compared(expected: Mapping[str, Answer], found: Mapping[str, Answer]) -> dict[str, Any]:
    """How many answers there are, and of how many the tokens, and the logprobs too, are equal."""
    other_tokens = [name for name in expected if found[name].token_ids != expected[name].token_ids]
    return {
        "cases": len(expected),
        "tokens_equal": len(expected) - len(other_tokens),
        "identical": sum(found[name] == expected[name] for name in expected),
        "other_tokens": other_tokens,
    }


def is_right(mode: str, figures: Mapping[str, Any]) -> bool:
    """In both modes the tokens are equal, in `exact` the logprobs too, and in `fast` graphs did it."""
    all_equal = figures["tokens_equal"] == figures["cases"]
    how = figures["identical"] == figures["cases"] if mode == "exact" else figures["graph_hits"] > 0
    return bool(all_equal and how and figures["pulls"] > 0)


@pytest.mark.parametrize("family", CASES)
def test_tokens_equal_plain_vllms(host: Host, end_to_end: EndToEnd, family: str) -> None:
    servers = Servers.of(family, host)
    wrong: dict[str, dict[str, Any]] = {}
    with Stack() as stack:
        servers.start(stack)
        expected = answers(servers.plain, family)
        for (mode, transport), consumer in servers.consumers.items():
            figures = compared(expected, answers(consumer, family))
            producer = servers.producers[mode]
            figures["pulls"] = int(producer.metric_reaching(1, "ec_producer_pulls_total", transport=transport))
            figures["graph_hits"] = int(producer.metric("ec_producer_graph_hits_total"))
            end_to_end.add(family, mode, transport, figures)
            if not is_right(mode, figures):
                wrong[f"{mode}, {transport}"] = figures
    assert not wrong
