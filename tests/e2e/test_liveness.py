"""Health that means something, and an end that is definite."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from consumer_shim.client import Producer, ProducerError
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.e2e.conftest import REPOSITORY
from tests.kit.photos import photos
from tests.kit.servers import ProducerServer

pytestmark = pytest.mark.e2e

STALL_S = 3
STALL_EXIT_S = 10
AT_ONCE_S = 3.0
NOTICED_S = 10.0
"""What the contract promises for a change of health."""


class FaultyProducer(ProducerServer):
    """The real service with an encoder that fails on command; a file of that name in `faults` is the command."""

    def __init__(self, model: Path, faults: Path, name: str, *extra_args: str) -> None:
        super().__init__(model, extra_args=("--stall-s", str(STALL_S), *extra_args), name=name, cwd=REPOSITORY)
        self.command[:1] = [sys.executable, "-m", "tests.kit.faulty_serve", str(faults)]
        self._faults = faults

    def begin_fault(self, name: str) -> None:
        (self._faults / name).touch()

    def end_fault(self, name: str) -> None:
        (self._faults / name).unlink()


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def encode(address: str, name: str, timeout_s: float = 60) -> pb.Ticket | ProducerError:
    client = Producer(address)
    try:
        (outcome,) = client.encode([pb.MediaItem(modality=pb.MODALITY_IMAGE, data=photos()[name].data)], timeout_s)
        return outcome
    except ProducerError as error:
        return error
    finally:
        client.close()


def seconds_until(server: ProducerServer, serving: bool, most_s: float) -> float:
    """How long it takes for health to be so."""
    begun_s = time.monotonic()
    while server.is_serving is not serving:
        assert time.monotonic() - begun_s < most_s, f"after {most_s} s health was not {serving}"
        time.sleep(0.05)
    return time.monotonic() - begun_s


def ticket_of(outcome: Any) -> pb.Ticket:
    assert isinstance(outcome, pb.Ticket), outcome
    return outcome


def test_a_stuck_step_is_noticed_and_a_slow_one_is_not(
    model: Path, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    server = FaultyProducer(model, tmp_path, "e2e-stuck", "--stall-exit-s", str(STALL_EXIT_S))
    with server:
        server.begin_fault("slow")
        slow = executor.submit(encode, server.address, "coffee.jpg")
        until_s = time.monotonic() + 3 * STALL_S
        while time.monotonic() < until_s:
            assert server.is_serving, "a slow step is not a stuck one"
            time.sleep(0.2)
        server.end_fault("slow")
        ticket_of(slow.result(60))

        server.begin_fault("stuck")
        stuck = executor.submit(encode, server.address, "rocket.png")
        seconds_until(server, False, NOTICED_S)
        server.end_fault("stuck")
        ticket_of(stuck.result(60))
        seconds_until(server, True, NOTICED_S)

        server.begin_fault("stuck")
        waiting: Future[pb.Ticket | ProducerError] = executor.submit(encode, server.address, "retina.jpg", 40)
        assert server.wait_ended(STALL_EXIT_S + NOTICED_S), "only a restart helps"
        assert isinstance(waiting.result(60), ProducerError)
        ending = server.stop()
        assert ending is not None
        assert ending.code == 1
        assert not ending.killed


def test_a_lost_device_ends_the_process(model: Path, tmp_path: Path) -> None:
    server = FaultyProducer(model, tmp_path, "e2e-lost")
    server.start()
    server.wait_ready()
    server.begin_fault("lost")
    outcome = encode(server.address, "coffee.jpg", 20)
    assert isinstance(outcome, ProducerError)
    assert server.wait_ended(NOTICED_S)
    ending = server.stop()
    assert ending is not None
    assert ending.code == 1
    assert not ending.killed


def test_stopping_is_seen_finishes_work_honours_leases_and_a_second_signal_exits_at_once(
    model: Path, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    server = FaultyProducer(model, tmp_path, "e2e-drain", "--drain-s", "30")
    server.start()
    server.wait_ready()
    client = Producer(server.address)
    held = ticket_of(encode(server.address, "coffee.jpg"))
    server.begin_fault("slow")
    in_hand = executor.submit(encode, server.address, "rocket.png")
    while not server.metric("ec_producer_queue_items"):
        time.sleep(0.05)
    os.kill(server.pid, signal.SIGTERM)
    seconds_until(server, False, NOTICED_S)
    refused = encode(server.address, "retina.jpg", 5)
    assert isinstance(refused, ProducerError)
    assert refused.reason == "SHUTTING_DOWN"
    server.end_fault("slow")
    done = ticket_of(in_hand.result(60))
    for ticket in (held, done):  # leased embeddings can still be had
        assert client.fetch(ticket, 10)
    assert server.wait_ended(NOTICED_S)
    ending = server.stop()
    assert ending is not None
    assert (ending.code, ending.killed) == (0, ())

    server.start()
    server.wait_ready()
    ticket_of(encode(server.address, "coffee.jpg"))  # its lease would be waited for
    os.kill(server.pid, signal.SIGTERM)
    seconds_until(server, False, NOTICED_S)
    signalled_s = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    while Path(f"/proc/{server.pid}").exists():  # its children, which end with it, may take longer
        assert time.monotonic() - signalled_s < AT_ONCE_S
        time.sleep(0.01)
    ending = server.stop()
    assert ending is not None
    assert ending.code == 128 + signal.SIGTERM
    client.close()
