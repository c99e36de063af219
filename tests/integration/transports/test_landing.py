"""The landing as the connector uses it: which transport it takes, its threads, and its end."""

import signal
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from consumer_shim.config import ShimConfig
from consumer_shim.landing import Landing
from consumer_shim.pull import Pull, PullState
from consumer_shim.tickets import PullTicket
from producer.transport import registry
from producer.wire.block import HEADER_BYTES
from tests.integration.transports.kit import BOUND_S, REGION_BYTES, ProducerProcess, eventually, failed, send
from tests.integration.transports.producer_process import rows_of
from tests.kit.leftovers import our_processes

KEY = "a" * 64


@pytest.fixture(scope="module")
def both() -> Iterator[ProducerProcess]:
    with ProducerProcess("nixl", "grpc") as producer:
        yield producer


@pytest.fixture(scope="module")
def mooncake() -> Iterator[ProducerProcess]:
    with ProducerProcess("mooncake", "grpc") as producer:
        yield producer


@pytest.fixture(scope="module")
def all_three() -> Iterator[ProducerProcess]:
    with ProducerProcess("grpc", "mooncake", "nixl") as producer:
        yield producer


@pytest.fixture(scope="module")
def grpc_only() -> Iterator[ProducerProcess]:
    with ProducerProcess("grpc") as producer:
        yield producer


def landing(*producers: ProducerProcess, transport: str = "auto", max_pulls: int = 8) -> Landing:
    addresses = tuple(producer.address for producer in producers)
    return Landing(
        ShimConfig(
            producers=addresses,
            transport=transport,
            nixl_devices="lo",
            region_bytes=REGION_BYTES,
            max_pulls=max_pulls,
        )
    )


def start(landing: Landing, ticket: PullTicket) -> Pull:
    block = landing.store.reserve(ticket.key, ticket.shape.block_bytes)
    pull = Pull(ticket, block, time.monotonic() + BOUND_S)
    landing.start(pull)
    return pull


def arrived(landing: Landing, pull: Pull) -> bool:
    assert eventually(lambda: pull.is_over)
    assert pull.state is PullState.READY, pull.failure
    begin = pull.block.offset + HEADER_BYTES
    rows = landing.region.view[begin : begin + pull.ticket.shape.payload_bytes]
    return bytes(rows) == rows_of(pull.ticket.key, pull.ticket.num_rows)


def test_auto_takes_the_most_that_both_have(
    all_three: ProducerProcess,
    both: ProducerProcess,
    mooncake: ProducerProcess,
    grpc_only: ProducerProcess,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "consumer_shim.landing")
    with closing(landing(all_three, both, mooncake, grpc_only)) as place:
        for number, producer in enumerate([both, mooncake, grpc_only, both, all_three]):
            assert arrived(place, start(place, producer.put(f"{number:064x}", 10)))
    assert caplog.messages == [
        f"pulling from {both.address} over nixl",
        f"pulling from {mooncake.address} over mooncake",
        f"pulling from {grpc_only.address} over grpc",
        f"pulling from {all_three.address} over nixl",
    ]


def test_what_cannot_be_had_is_passed_over(
    all_three: ProducerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "consumer_shim.landing")
    monkeypatch.setenv("UCX_TLS", "nonsense")
    with closing(landing(all_three)) as place:
        for number in range(3):
            assert arrived(place, start(place, all_three.put(f"{number:064x}", 10)))
    refused, chosen = caplog.messages
    assert refused.startswith("nixl is not used: the transport's agent did not start: nixlBackendError")
    assert chosen == f"pulling from {all_three.address} over mooncake"


def test_auto_starts_no_agent_that_nobody_offers(grpc_only: ProducerProcess) -> None:
    before = our_processes()
    with closing(landing(grpc_only)) as place:
        assert arrived(place, start(place, grpc_only.put(KEY, 10)))
        assert our_processes() == before


@pytest.mark.parametrize("transport", registry.LIBRARY_TRANSPORTS)
def test_one_of_several_by_name(transport: str, all_three: ProducerProcess, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "consumer_shim.landing")
    with closing(landing(all_three, transport=transport)) as place:
        assert arrived(place, start(place, all_three.put(KEY, 10)))
    assert caplog.messages == [f"pulling from {all_three.address} over {transport}"]


def test_grpc_starts_no_agent(both: ProducerProcess) -> None:
    before = our_processes()
    with closing(landing(both, transport="grpc")) as place:
        assert arrived(place, start(place, both.put(KEY, 10)))
        assert our_processes() == before


@pytest.mark.parametrize("transport", registry.LIBRARY_TRANSPORTS)
def test_none_is_given_up_silently(transport: str, grpc_only: ProducerProcess) -> None:
    """It was asked for by name."""
    with closing(landing(grpc_only, transport=transport)) as place:
        pull = start(place, grpc_only.put(KEY, 10))
        assert eventually(lambda: pull.is_over)
        assert failed(pull, 503, f"UNKNOWN_TRANSPORT: transport '{transport}' is not offered here; grpc are")


def test_more_pulls_than_threads(both: ProducerProcess) -> None:
    with closing(landing(both, max_pulls=2)) as place:
        pulls = [start(place, both.put(f"f{number:063x}", 50)) for number in range(32)]
        assert all(arrived(place, pull) for pull in pulls)


def test_closing_ends_its_agent(both: ProducerProcess) -> None:
    before = our_processes()
    with closing(landing(both)) as place:
        assert arrived(place, start(place, both.put(KEY, 10)))
        assert len(our_processes() - before) == 1
    assert eventually(lambda: our_processes() == before)


def test_a_producer_that_stands_still_holds_up_no_other(both: ProducerProcess) -> None:
    with ProducerProcess("grpc") as frozen, closing(landing(frozen, both)) as place:
        first = frozen.put("b" * 64, 10)
        send(signal.SIGSTOP, frozen.pid)
        try:
            waiting = start(place, first)
            time.sleep(0.5)  # by then it has asked
            other = start(place, both.put(KEY, 10))
            assert eventually(lambda: other.is_over)
            assert not waiting.is_over
        finally:
            send(signal.SIGCONT, frozen.pid)
