"""What a user gets: both sides started from the wheel, in an environment that holds nothing of the source tree."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Servers
from tests.kit.chat import ask, chat_request
from tests.kit.photos import photos
from tests.kit.servers import ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack
from tests.kit.wheel import build_wheel, install_wheel

pytestmark = pytest.mark.e2e


def test_both_sides_start_from_the_wheel(model: Path, servers: Servers, tmp_path: Path) -> None:
    environment = install_wheel(build_wheel(tmp_path), tmp_path / "env")
    place = {"bin_dir": environment.bin, "env": environment.environ, "cwd": tmp_path}
    with Stack() as stack:
        producer = ProducerServer(model, transports=("nixl",), name="wheel-producer", **place)
        arguments = consumer_args(producer.address, "auto")
        llm_only = VllmServer(model, extra_args=arguments, name="wheel-llm-only", **place)
        stack.start(producer)
        stack.start(llm_only)
        stack.wait_ready(print)
        request = chat_request([photos()["rocket.png"], "What is it?"])
        assert ask(llm_only.url, request) == ask(servers.plain.url, request)
        pulls = producer.metric_reaching(1, "ec_producer_pulls_total", transport="shm")  # the most capable on one host
        assert pulls == 1
