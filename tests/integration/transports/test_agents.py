"""Agents: their end takes nothing down with it, they come back, and none outlives its owner."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from producer.memory.region import SharedRegion
from producer.transport import agent as agent_module
from producer.transport import registry
from producer.transport.agent import MAX_UNSETTLED, AgentOutlet, AgentReader
from producer.transport.base import TransportError
from tests.integration.transports.kit import BOUND_S, Consumer, ProducerProcess, eventually, failed, send
from tests.integration.transports.producer_process import OPTIONS
from tests.kit.leftovers import our_processes

KEY = "a" * 64
BREAK = "PYTHONHOME"
"""With this environment variable at a folder that is not there, no agent can start."""


@pytest.fixture(scope="module", params=registry.LIBRARY_TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fragile(transport: str) -> Iterator[Consumer]:
    """A consumer whose agent a test may kill."""
    with Consumer(transport) as consumer:
        yield consumer


def is_up(consumer: Consumer) -> bool:
    assert consumer.library is not None
    return consumer.library.agent.identity is not None


def test_the_producer_survives_its_agent(consumer: Consumer, mortal: ProducerProcess) -> None:
    ticket = mortal.put(KEY, 100)
    (first,) = mortal.agent_pids
    with consumer.before_each_read(lambda: send(signal.SIGKILL, first)):
        pull = consumer.pull(ticket)
    assert failed(pull, 503, f"pulling over {consumer.transport} failed: ")
    assert eventually(lambda: mortal.agent_pids not in ([], [first]))
    assert consumer.works_with(mortal)
    assert consumer.store.used_bytes == 0


def test_an_agent_that_stays_down_is_said_so(consumer: Consumer, mortal: ProducerProcess) -> None:
    """It cannot be started again until its environment is right; what the producer holds outlives that."""
    ticket = mortal.put(KEY, 100)
    mortal.ask("environ", BREAK, "/nowhere")
    send(signal.SIGKILL, *mortal.agent_pids)
    assert eventually(lambda: not mortal.agent_pids)
    assert failed(consumer.pull(ticket), 503, f"TRANSPORT_DOWN: {consumer.transport} is down")
    assert mortal.ask("num_leases") == 1
    mortal.ask("environ", BREAK, "")
    assert eventually(lambda: mortal.agent_pids)
    assert consumer.works_with(mortal)


def test_a_consumer_survives_its_agent(fragile: Consumer, producer: ProducerProcess) -> None:
    assert fragile.works_with(producer)
    assert fragile.library is not None
    agent = fragile.library.agent
    with fragile.before_each_read(lambda: send(signal.SIGKILL, agent.pid)):
        pull = fragile.pull(producer.put(KEY, 100))
    assert failed(pull, 503, "the transport's agent (died|is down|takes no work)")
    assert fragile.settles()
    assert eventually(lambda: is_up(fragile))
    assert fragile.works_with(producer)


def test_reads_in_flight_fail_with_the_agent(fragile: Consumer, mortal: ProducerProcess) -> None:
    """The producer stands still, so the read cannot end by itself."""
    assert fragile.library is not None
    agent = fragile.library.agent
    stopped = mortal.agent_pids
    ticket = mortal.put(KEY, 16384)
    with fragile.before_each_read(lambda: send(signal.SIGSTOP, *stopped)):
        pull = fragile.start(ticket)
        assert eventually(lambda: not agent.is_settled(pull.block.offset))
    send(signal.SIGKILL, agent.pid)
    assert eventually(lambda: pull.is_over)
    assert failed(pull, 503, "the transport's agent died")
    assert fragile.store.used_bytes == 0
    send(signal.SIGCONT, *stopped)
    assert eventually(lambda: is_up(fragile))


def test_a_consumer_that_dies_during_reads(
    transport: str, consumer: Consumer, fragile: Consumer, mortal: ProducerProcess
) -> None:
    """The producer lives on, and serves others; its agent is no one's victim, or is back at once."""
    assert fragile.library is not None
    tickets = [mortal.put(f"{number:064x}", 900) for number in range(32)]
    before = mortal.agent_pids
    pulls = [fragile.start(ticket) for ticket in tickets]
    assert eventually(lambda: any(pull.is_over for pull in pulls))
    send(signal.SIGKILL, fragile.library.agent.pid)
    assert eventually(lambda: all(pull.is_over for pull in pulls))
    assert eventually(lambda: mortal.agent_pids)
    assert consumer.works_with(mortal)
    if transport == "mooncake":
        assert mortal.agent_pids == before


def test_reads_past_their_deadline_are_bounded(fragile: Consumer, mortal: ProducerProcess) -> None:
    """They may still write, so no more are begun than can be kept."""
    assert fragile.library is not None
    ticket = mortal.put(KEY, 1)
    lease = fragile.acquire(ticket)
    stopped = mortal.agent_pids
    send(signal.SIGSTOP, *stopped)
    for number in range(MAX_UNSETTLED):
        with pytest.raises(TransportError, match="no end of the read") as unsettled:
            fragile.library.read(lease.block, number * 4096, 0.0)
        assert not unsettled.value.settled
    with pytest.raises(TransportError, match="64 reads are in flight or past their deadline already") as refused:
        fragile.library.read(lease.block, MAX_UNSETTLED * 4096, 0.0)
    assert refused.value.settled
    send(signal.SIGCONT, *stopped)
    assert eventually(lambda: all(fragile.library.is_settled(number * 4096) for number in range(MAX_UNSETTLED)))
    assert fragile.works_with(mortal)


@pytest.mark.parametrize(
    ("name", "variable", "why"),
    [
        ("nixl", "UCX_TLS", "nixlBackendError"),
        ("nixl", BREAK, "no answer"),
        ("mooncake", BREAK, "no answer"),
    ],
)
def test_an_agent_that_cannot_start(name: str, variable: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = our_processes()
    monkeypatch.setenv(variable, "/nowhere")
    refused = pytest.raises(TransportError, match=f"the transport's agent did not start: {why}")
    with SharedRegion.create("test-start", 1 << 20) as region, refused:
        registry.open_reader(name, region, OPTIONS[name])
    assert our_processes() == before


BROKEN = """
import time
from producer.memory.region import SharedRegion
from producer.transport.agent import AgentProcess
from producer.transport.base import BlockDescriptor, TransportError
with SharedRegion.create("broken", 1 << 20) as region:
    agent = AgentProcess("tests.integration.transports.failing_backend:FailingBackend", "reader", region, {})
    first = agent.pid
    block = BlockDescriptor(
        transport="", lease_id="", address=0, num_bytes=1, generation=1, peer="", peer_metadata=b""
    )
    try:
        agent.read(block, 0, 5.0)
    except TransportError as error:
        assert error.settled, error
    deadline = time.monotonic() + 10.0
    while agent.pid == first or agent.identity is None:
        assert time.monotonic() < deadline, "not started again"
        time.sleep(0.02)
    agent.close()
"""


def test_an_agent_whose_library_breaks_is_started_again() -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN], timeout=BOUND_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OWNER = """
import sys, time
from producer.memory.region import SharedRegion
from producer.transport import registry
from tests.integration.transports.producer_process import OPTIONS
region = SharedRegion.create("owner", 1 << 20)
opened = (registry.open_outlet, registry.open_reader)
agents = [one(name, region, OPTIONS[name]).agent for name in registry.LIBRARY_TRANSPORTS for one in opened]
print("agents", *(agent.pid for agent in agents), flush=True)
time.sleep(600)
"""


def test_agents_end_with_an_owner_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        line = next(line for line in owner.stdout if line.startswith("agents"))  # the library prints, too
        agents = {int(pid) for pid in line.split()[1:]}
        assert len(agents) == 4
        assert agents <= our_processes()
        owner.kill()
    assert eventually(lambda: not agents & our_processes())


def test_closing_while_the_agent_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with SharedRegion.create("test-down", 1 << 20) as region:
        reader = registry.open_reader("mooncake", region, OPTIONS["mooncake"])
        assert isinstance(reader, AgentReader)
        monkeypatch.setenv(BREAK, "/nowhere")  # it cannot come back
        send(signal.SIGKILL, reader.agent.pid)
        assert eventually(lambda: reader.agent.identity is None)
        reader.close()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGTERM,
    ],
)
def test_a_signal_for_the_whole_group_is_the_owners_to_handle(number: signal.Signals) -> None:
    """Ctrl-C, and systemd's stop, reach every process of a group; reads in hand go on while the owner drains."""
    with SharedRegion.create("test-signal", 1 << 20) as region:
        outlet = registry.open_outlet("mooncake", region, OPTIONS["mooncake"])
        assert isinstance(outlet, AgentOutlet)
        try:
            first = outlet.agent.pid
            send(number, first)
            assert not eventually(lambda: outlet.agent.pid != first or not outlet.is_up, bound_s=3.0)
        finally:
            outlet.close()


def test_a_frozen_agent_is_down_within_seconds_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_FROZEN_S", 8.0)
    with SharedRegion.create("test-frozen", 1 << 20) as region:
        outlet = registry.open_outlet("mooncake", region, OPTIONS["mooncake"])
        assert isinstance(outlet, AgentOutlet)
        try:
            first = outlet.agent.pid
            assert not eventually(lambda: not outlet.is_up, bound_s=agent_module._SILENT_S + 1), "it says that it lives"
            send(signal.SIGSTOP, first)
            assert eventually(lambda: not outlet.is_up, bound_s=agent_module._SILENT_S + 2)
            assert eventually(lambda: outlet.is_up)
            assert outlet.agent.pid != first
        finally:
            outlet.close()
