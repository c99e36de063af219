"""The shim starts where one transport's library, or all, is not installed: 'auto' does without, a name says why not."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from tests.integration.transports.kit import BOUND_S, ProducerProcess

# Pulls the embedding of a ticket with some libraries hidden, and prints how the pull ended.
PULL = """
import json, logging, sys, time
sys.modules.update(dict.fromkeys(sys.argv[3:]))
from consumer_shim.config import ShimConfig
from consumer_shim.landing import Landing
from consumer_shim.pull import Pull
from consumer_shim.tickets import PullTicket
logging.basicConfig(level="INFO", format="%(message)s")
ticket = PullTicket(**json.loads(sys.argv[2]))
landing = Landing(
    ShimConfig(producers=(ticket.address,), transport=sys.argv[1], region_bytes=1 << 20, nixl_devices="lo")
)
pull = Pull(ticket, landing.store.reserve(ticket.key, ticket.shape.block_bytes), time.monotonic() + 30)
landing.start(pull)
while not pull.is_over:
    time.sleep(0.01)
landing.close()
print(pull.state.value)
"""
NIXL = ("nixl", "nixl_cu12", "nixl_cu13")
MOONCAKE = ("mooncake",)
NO_NIXL = "NIXL is not installed; pip install 'ec-producer[nixl]'"
NO_MOONCAKE = "Mooncake is not installed; pip install 'ec-producer[mooncake]'"


@pytest.fixture(scope="module")
def ticket() -> Iterator[str]:
    with ProducerProcess("nixl", "mooncake", "grpc") as producer:
        yield json.dumps(asdict(producer.put("a" * 64, 10)))


def pull(transport: str, ticket: str, *hidden: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", PULL, transport, ticket, *hidden]
    return subprocess.run(command, timeout=BOUND_S, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("hidden", "refused", "taken"),
    [
        (NIXL, [f"nixl is not used: {NO_NIXL}"], "mooncake"),
        (MOONCAKE, [], "nixl"),
        (NIXL + MOONCAKE, [f"nixl is not used: {NO_NIXL}", f"mooncake is not used: {NO_MOONCAKE}"], "grpc"),
    ],
)
def test_auto_takes_what_is_there(hidden: tuple[str, ...], refused: list[str], taken: str, ticket: str) -> None:
    done = pull("auto", ticket, *hidden)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ready", done.stderr  # a library prints, too
    assert [line for line in done.stderr.splitlines() if "is not used" in line] == refused
    assert done.stderr.splitlines()[-1].endswith(f" over {taken}")


@pytest.mark.parametrize(
    ("transport", "hidden", "missing"), [("nixl", NIXL, NO_NIXL), ("mooncake", MOONCAKE, NO_MOONCAKE)]
)
def test_a_name_says_what_is_missing(transport: str, hidden: tuple[str, ...], missing: str, ticket: str) -> None:
    done = pull(transport, ticket, *hidden)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ValueError: transport is '{transport}': {missing}"
