"""A producer that stands still: the pull ends at its deadline, and its memory is nobody's until the read has ended."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from consumer_shim.pull import Pull
from producer.memory.block_store import Block, BlockState, StoreFullError
from tests.integration.transports.kit import BOUND_S, Consumer, ProducerProcess, failed, send

KEY = "a" * 64


@dataclass(frozen=True)
class Frozen:
    """A pull that has met a producer which stopped between lease and read."""

    consumer: Consumer
    producer: ProducerProcess
    pids: list[int]
    pull: Pull

    def fill(self) -> list[Block]:
        """Reserves all landing memory that there is, in pieces as large as the pull's."""
        blocks: list[Block] = []
        try:
            while True:
                blocks.append(self.consumer.store.reserve(str(len(blocks)), self.pull.block.num_bytes))
        except StoreFullError:
            return blocks


@pytest.fixture
def frozen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Frozen]:
    transport, _, network = request.param.partition(" over ")
    if network:
        monkeypatch.setenv("UCX_TLS", network)
    with ProducerProcess(transport) as producer, Consumer(transport) as consumer:
        if network:
            assert consumer.works_with(producer)
        ticket = producer.put(KEY, 16384)
        pids = [producer.pid, *producer.agent_pids]
        consumer.read_timeout_s = 1.0
        try:
            with consumer.before_each_read(lambda: send(signal.SIGSTOP, *pids)):
                pull = consumer.pull(ticket)
            consumer.read_timeout_s = BOUND_S
            yield Frozen(consumer, producer, pids, pull)
        finally:
            send(signal.SIGCONT, *pids)


LIBRARIES = ["nixl", "nixl over tcp", "mooncake", "mooncake over tcp"]
"""With "over tcp" they have met before. On one host NIXL else copies from a peer without that peer's help."""


@pytest.mark.parametrize("frozen", LIBRARIES, indirect=True)
def test_late_bytes_hit_nobody(frozen: Frozen) -> None:
    consumer, pull = frozen.consumer, frozen.pull
    assert failed(pull, 504, f"pulling over {consumer.transport} timed out: no end of the read within 1.0 s")
    consumer.puller.settle()
    assert pull.block.state is BlockState.QUARANTINED
    others = frozen.fill()
    views = [consumer.region.view[other.offset : other.offset + other.num_bytes] for other in others]
    for view in views:
        view[:] = b"\x55" * len(view)
    send(signal.SIGCONT, *frozen.pids)
    for other in others:
        consumer.store.free(other)
    assert consumer.settles()
    assert pull.block.state is BlockState.FREED
    assert all(view == b"\x55" * len(view) for view in views)
    assert consumer.works_with(frozen.producer)


@pytest.mark.parametrize("frozen", LIBRARIES, indirect=True)
def test_its_death_ends_the_wait(frozen: Frozen) -> None:
    assert frozen.pull.block.state is BlockState.QUARANTINED
    send(signal.SIGKILL, *frozen.pids)
    assert frozen.consumer.settles()
    assert frozen.pull.block.state is BlockState.FREED


@pytest.mark.parametrize("frozen", LIBRARIES, indirect=True)
def test_it_holds_up_no_other(frozen: Frozen) -> None:
    with ProducerProcess(frozen.consumer.transport) as other:
        frozen.consumer.read_timeout_s = 10.0
        assert frozen.consumer.works_with(other)
        assert frozen.pull.block.state is BlockState.QUARANTINED


@pytest.mark.parametrize("frozen", ["grpc"], indirect=True)
def test_grpc_writes_nothing_late(frozen: Frozen) -> None:
    """Its reader itself writes, and has returned."""
    assert failed(frozen.pull, 504, "pulling over grpc timed out: DEADLINE_EXCEEDED")
    assert frozen.pull.block.state is BlockState.FREED
    send(signal.SIGCONT, *frozen.pids)
    assert frozen.consumer.works_with(frozen.producer)
