"""The shim starts where NIXL is not installed: 'auto' pulls over gRPC, and 'nixl' says what is missing."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from tests.integration.transports.kit import BOUND_S, ProducerProcess

# Pulls the embedding of a ticket with NIXL hidden, and prints how the pull ended.
PULL = """
import json, logging, sys, time
sys.modules.update(dict.fromkeys(["nixl", "nixl_cu12", "nixl_cu13"]))
from consumer_shim.config import ShimConfig
from consumer_shim.landing import Landing
from consumer_shim.pull import Pull
from consumer_shim.tickets import PullTicket
logging.basicConfig(level="INFO", format="%(message)s")
ticket = PullTicket(**json.loads(sys.argv[2]))
landing = Landing(ShimConfig(producers=(ticket.address,), transport=sys.argv[1], region_bytes=1 << 20))
pull = Pull(ticket, landing.store.reserve(ticket.key, ticket.shape.block_bytes), time.monotonic() + 30)
landing.start(pull)
while not pull.is_over:
    time.sleep(0.01)
landing.close()
print(pull.state.value)
"""


@pytest.fixture(scope="module")
def ticket() -> Iterator[str]:
    with ProducerProcess("grpc") as producer:
        yield json.dumps(asdict(producer.put("a" * 64, 10)))


def pull(transport: str, ticket: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", PULL, transport, ticket]
    return subprocess.run(command, timeout=BOUND_S, capture_output=True, text=True)


def test_auto_pulls_over_grpc(ticket: str) -> None:
    done = pull("auto", ticket)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    assert "NIXL is not used: NIXL is not installed; pip install 'ec-producer[nixl]'" in done.stderr
    assert " over grpc" in done.stderr


def test_nixl_says_what_is_missing(ticket: str) -> None:
    done = pull("nixl", ticket)
    assert done.returncode == 1
    expected = "ValueError: transport is 'nixl': NIXL is not installed; pip install 'ec-producer[nixl]'"
    assert done.stderr.splitlines()[-1] == expected
