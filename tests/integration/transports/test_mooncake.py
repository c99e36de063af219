"""What Mooncake alone does: it knows a peer by address and port only, and needs what others do not."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from producer.memory.region import SharedRegion
from producer.transport import registry
from producer.transport.agent import AgentOutlet
from producer.transport.base import BlockDescriptor, TransportError, TransportUnavailableError
from tests.integration.transports.kit import Consumer, ProducerProcess, failed, send
from tests.integration.transports.producer_process import OPTIONS
from tests.kit.leftovers import our_processes
from tests.kit.ports import PORTS

KEY = "a" * 64


@pytest.fixture(scope="module")
def transport() -> str:
    return "mooncake"


class Front:
    """One port that leads to whichever producer's handshake port was named last, as if that had started there again.

    It gives the producer's name in answers as its own, as the library has it from there.
    """

    def __init__(self, block: BlockDescriptor) -> None:
        self.target = block.peer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.peer = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        """One question and its answer at a time, as the library asks."""
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with near, suppress(ConnectionRefusedError):
                    self._lead(near, self.target)

    def _lead(self, near: socket.socket, target: str) -> None:
        assert len(target) == len(self.peer)  # lengths stand before texts
        host, _, port = target.rpartition(":")
        with socket.create_connection((host, int(port))) as far:
            there = threading.Thread(target=copy, args=[near, far, b"", b""], daemon=True)
            there.start()
            copy(far, near, target.encode(), self.peer.encode())
            there.join()


def copy(source: socket.socket, sink: socket.socket, old: bytes, new: bytes) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 20):
            sink.sendall(data.replace(old, new) if old else data)
        sink.shutdown(socket.SHUT_WR)


Redirect = Callable[[Callable[[BlockDescriptor], BlockDescriptor]], None]


@pytest.fixture
def redirect(consumer: Consumer) -> Iterator[Redirect]:
    """Has the consumer read something else than its leases say."""
    yield lambda act: setattr(consumer, "redirect", act)
    consumer.redirect = lambda block: block


@pytest.mark.parametrize("moved", [False, True], ids=["the same address", "another address"])
def test_a_producer_that_starts_again_on_the_same_port(
    moved: bool, consumer: Consumer, mortal: ProducerProcess, redirect: Redirect
) -> None:
    """At the same address the library reads the new process's bytes, and calls that success."""
    old = mortal.put(KEY, 100)
    with ExitStack() as stack:
        front = Front(consumer.acquire(mortal.put(KEY, 100)).block)
        stack.callback(front.close)
        redirect(lambda block: replace(block, peer=front.peer))
        assert consumer.works_with(mortal)
        second = stack.enter_context(ProducerProcess("mooncake"))
        new = consumer.acquire(second.put(KEY, 100)).block

        def restart() -> None:
            send(signal.SIGKILL, *mortal.agent_pids)
            mortal.kill()
            front.target = new.peer
            if not moved:
                redirect(lambda block: replace(block, peer=front.peer, address=new.address))

        with consumer.before_each_read(restart):
            pull = consumer.pull(old)
        if moved:
            assert failed(pull, 503, "pulling over mooncake failed: Mooncake: the peer has gone or refused the read")
        else:
            assert failed(pull, 502, "over mooncake is not the embedding: the block's epoch is")
        redirect(lambda block: replace(block, peer=front.peer))
        assert consumer.works_with(second)
    assert consumer.store.used_bytes == 0


def test_nothing_but_the_pool_can_be_read(consumer: Consumer, producer: ProducerProcess, redirect: Redirect) -> None:
    before = producer.agent_pids
    redirect(lambda block: replace(block, address=block.address - 4096))
    assert failed(consumer.pull(producer.put(KEY, 100)), 503, "Mooncake: the peer has gone or refused the read")
    redirect(lambda block: block)
    assert producer.agent_pids == before
    assert consumer.works_with(producer)


def test_both_sides_must_use_one_protocol(consumer: Consumer, producer: ProducerProcess, redirect: Redirect) -> None:
    redirect(lambda block: replace(block, peer_metadata=b"rdma"))
    pull = consumer.pull(producer.put(KEY, 100))
    assert failed(pull, 503, "the producer's Mooncake uses rdma, this side's tcp")


def test_a_peer_that_never_was_there(consumer: Consumer, producer: ProducerProcess, redirect: Redirect) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
        redirect(lambda block: replace(block, peer=nobody))
        assert failed(consumer.pull(producer.put(KEY, 100)), 503, f"Mooncake: {nobody} does not answer")


def test_several_peers_that_stand_still_at_once(consumer: Consumer, producer: ProducerProcess) -> None:
    """The library would wait for the first under the lock that all its reads take."""
    with ExitStack() as stack:
        frozen = [stack.enter_context(ProducerProcess("mooncake")) for _ in range(2)]
        tickets = [one.put(KEY, 100) for one in frozen]
        leases = [consumer.acquire(ticket) for ticket in tickets]
        pids = [pid for one in frozen for pid in one.agent_pids]
        stack.callback(send, signal.SIGCONT, *pids)
        send(signal.SIGSTOP, *pids)
        assert consumer.library is not None
        for number, lease in enumerate(leases):
            with pytest.raises(TransportError, match="no end of the read"):
                consumer.library.read(lease.block, (20 << 20) + number * (1 << 20), 0.5)
        consumer.read_timeout_s = 10.0
        assert consumer.works_with(producer)


# What is missing on the machine


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with SharedRegion.create("test-missing", 1 << 20) as region:
        yield region


def taken_ports(stack: ExitStack) -> tuple[int, int]:
    """Two ports in a row that are taken while `stack` is open."""
    for port in PORTS[::2]:
        with ExitStack() as tries:
            try:
                for one in (port, port + 1):
                    tries.enter_context(socket.create_server(("0.0.0.0", one)))
            except OSError:
                continue
            stack.push(tries.pop_all())
            return port, port + 1
    raise AssertionError("no ports are free")


def test_no_port_is_free(region: SharedRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    before = our_processes()
    with ExitStack() as stack:
        low, high = taken_ports(stack)
        monkeypatch.setenv("MC_MIN_RPC_PORT", str(low))
        monkeypatch.setenv("MC_MAX_RPC_PORT", str(high))
        with pytest.raises(TransportError, match="Mooncake does not start at"):
            registry.open_outlet("mooncake", region, OPTIONS["mooncake"])
    assert our_processes() == before


@pytest.mark.parametrize(
    ("libraries", "packages"),
    [
        (["libibverbs.so.1"], "libibverbs1"),
        (["libnuma.so.1"], "libnuma1"),
        (["libibverbs.so.1", "libcurl.so.4", "libnuma.so.1"], "libcurl4 libibverbs1 libnuma1"),
    ],
)
def test_the_missing_debian_packages_are_named(
    libraries: list[str], packages: str, region: SharedRegion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader meets empty files in their place, and goes no further."""
    before = our_processes()
    for library in libraries:
        (tmp_path / library).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    for open_end in (registry.open_outlet, registry.open_reader):
        with pytest.raises(TransportUnavailableError) as refused:
            open_end("mooncake", region, OPTIONS["mooncake"])
        assert str(refused.value).startswith(f"Mooncake lacks system libraries; apt-get install {packages} (")
    assert our_processes() == before


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this machine has an RDMA device")
def test_rdma_without_a_device(region: SharedRegion) -> None:
    with pytest.raises(TransportUnavailableError, match="is 'rdma', but this machine has no RDMA device"):
        registry.open_reader("mooncake", region, OPTIONS["mooncake"] | {"protocol": "rdma"})


def test_ipv6(region: SharedRegion) -> None:
    options = {"host": "::1", "protocol": "tcp"}
    with ExitStack() as stack:
        outlet = registry.open_outlet("mooncake", region, options)
        stack.callback(outlet.close)
        reader = registry.open_reader("mooncake", region, options)
        stack.callback(reader.close)
        assert isinstance(outlet, AgentOutlet)
        there = outlet.agent.identity
        assert there is not None
        assert there.name.startswith("[::1]:")
        region.view[:4] = b"once"
        block = BlockDescriptor(
            transport="mooncake",
            lease_id="",
            address=there.address,
            num_bytes=4,
            generation=1,
            peer=there.name,
            peer_metadata=there.metadata,
        )
        reader.read(block, 4096, 30.0)
        assert bytes(region.view[4096:4100]) == b"once"
