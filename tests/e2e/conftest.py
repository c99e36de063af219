"""Real processes, shared by the tests of this folder: a producer, a plain vLLM and LLM-only ones behind the shim."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.chat import Part
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.collector import Collector
from tests.kit.photos import photos
from tests.kit.servers import ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

REPOSITORY = Path(__file__).parents[2]
TRANSPORTS = ("grpc", "nixl", "mooncake", "shm")
VLLM_TRACES = "nixl"
"""The server in which vLLM itself makes spans, too."""


@dataclass(frozen=True, slots=True)
class Servers:
    """What runs: the producer, plain vLLM, and an LLM-only vLLM by transport."""

    producer: ProducerServer
    plain: VllmServer
    llm_only: dict[str, VllmServer]


@pytest.fixture(scope="package")
def model() -> Path:
    return cached_checkpoint("qwen2_5_vl")


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Gets the traces that a test's request began, and no others."""
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="package")
def servers(model: Path, stack: Stack, collector: Collector) -> Servers:
    """Started together, since starting is most of their time."""
    tracing: dict[str, Any] = {"otlp_traces_endpoint": collector.address, "trace_sample_ratio": 0}
    traced = ("--otlp-traces-endpoint", collector.address, "--trace-sample-ratio", "0")
    producer = ProducerServer(model, transports=("nixl", "mooncake"), extra_args=traced, name="e2e-producer")
    plain = VllmServer(model, name="e2e-plain")
    llm_only = {
        transport: VllmServer(
            model,
            extra_args=[
                *consumer_args(producer.address, transport, **tracing),
                *(("--otlp-traces-endpoint", f"http://{collector.address}") if transport == VLLM_TRACES else ()),
            ],
            name=f"e2e-{transport}",
        )
        for transport in TRANSPORTS
    }
    for service in (producer, plain, *llm_only.values()):
        stack.start(service)
    stack.wait_ready(print)
    return Servers(producer, plain, llm_only)


@pytest.fixture(scope="package")
def conversations() -> dict[str, list[Part]]:
    """Prompts by name: photographs as JPEG and PNG, one and two, repeated, and none."""
    photo = photos()
    return {
        "jpeg": [photo["coffee.jpg"], "What is it?"],
        "png": ["Look:", photo["chelsea.png"], "What is it?"],
        "two": [photo["rocket.jpg"], "and", photo["astronaut.png"], "How do they differ?"],
        "twice the same": [photo["retina.png"], photo["retina.png"], "Are they equal?"],
        "none": ["Hello."],
    }
