"""What every transport does: whole blocks of all sizes arrive, and what is not the promised block is refused."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from consumer_shim.pull import PullState
from consumer_shim.tickets import PullTicket
from producer.memory.block_store import BlockState
from tests.integration.transports.kit import POOL_BYTES, Consumer, ProducerProcess, eventually, failed
from tests.integration.transports.producer_process import rows_of, shape_of

WHOLE_POOL_ROWS = (POOL_BYTES - shape_of(0).block_bytes) // shape_of(1).payload_bytes
KEY = "a" * 64
TORN_KEY = "d" * 64


@pytest.fixture(autouse=True)
def _nothing_is_held(consumer: Consumer, producer: ProducerProcess) -> Iterator[None]:
    """Every test ends without leases, and with as much landing memory in use as before."""
    producer.ask("release_all")
    used_bytes = consumer.store.used_bytes
    yield
    assert consumer.store.used_bytes == used_bytes
    assert eventually(lambda: producer.ask("num_leases") == 0)  # a pull that is ready releases after that


@pytest.mark.parametrize("num_rows", [1, 15, 16, 4095, 4096, 16384, WHOLE_POOL_ROWS])
def test_every_size_arrives(consumer: Consumer, producer: ProducerProcess, num_rows: int) -> None:
    key = f"{num_rows:064x}"
    pull = consumer.pull(producer.put(key, num_rows))
    assert pull.state is PullState.READY, pull.failure
    assert consumer.rows(pull) == rows_of(key, num_rows)
    consumer.forget(pull)


def test_many_at_once(consumer: Consumer, producer: ProducerProcess) -> None:
    tickets = [producer.put(f"f{number:063x}", 1 + number * 29) for number in range(32)]
    pulls = [consumer.start(ticket) for ticket in tickets]
    assert eventually(lambda: all(pull.is_over for pull in pulls))
    assert {pull.state for pull in pulls} == {PullState.READY}
    for pull in pulls:
        assert consumer.rows(pull) == rows_of(pull.ticket.key, pull.ticket.num_rows)
        consumer.forget(pull)


def test_the_same_embedding_again(consumer: Consumer, producer: ProducerProcess) -> None:
    for _ in range(3):
        pull = consumer.pull(producer.put(KEY, 4))
        assert consumer.rows(pull) == rows_of(KEY, 4)
        consumer.forget(pull)


Forge = Callable[[PullTicket], PullTicket]


@pytest.mark.parametrize(
    ("forge", "http_status", "sentence"),
    [
        pytest.param(lambda ticket: replace(ticket, num_rows=5), 502, "has 1216 bytes, expected 1472", id="rows"),
        pytest.param(lambda ticket: replace(ticket, dtype="float16"), 502, "has 1216 bytes", id="dtype"),
        pytest.param(lambda ticket: replace(ticket, num_rows=2, width=128), 502, "rows is 4, expected 2", id="shape"),
        pytest.param(lambda ticket: replace(ticket, key="b" * 64), 503, "NOT_IN_POOL", id="key"),
        pytest.param(lambda ticket: replace(ticket, epoch="0" * 16), 503, "EPOCH_MISMATCH.*started again", id="epoch"),
    ],
)
def test_another_embedding_than_the_ticket_says(
    consumer: Consumer, producer: ProducerProcess, forge: Forge, http_status: int, sentence: str
) -> None:
    ticket = producer.put(KEY, 4)
    pull = consumer.pull(forge(ticket))
    assert failed(pull, http_status, sentence)
    assert pull.block.state is BlockState.FREED
    producer.ask("release", ticket.lease_id)


def test_an_embedding_that_was_evicted(consumer: Consumer, producer: ProducerProcess) -> None:
    ticket = producer.put(KEY, 4)
    producer.ask("release", ticket.lease_id)
    assert producer.ask("evict", KEY)
    assert failed(consumer.pull(ticket), 503, "NOT_IN_POOL: no embedding of key")


def test_a_descriptor_whose_block_has_gone(consumer: Consumer, producer: ProducerProcess) -> None:
    """Its memory holds another embedding when the read comes."""
    ticket = producer.put(KEY, 4)
    with consumer.before_each_read(lambda: producer.ask("release_all") and producer.ask("evict", KEY)):
        pull = consumer.pull(ticket)
    expected = {
        "grpc": (503, "over grpc failed: .*NOT_FOUND: lease [0-9a-f]{32} does not exist or has ended"),
    }
    forged = (502, f"over {consumer.transport} is not the embedding: the block's (magic|generation) is")
    assert failed(pull, *expected.get(consumer.transport, forged))
    assert pull.block.state is BlockState.FREED


def test_a_block_that_is_rewritten_during_the_read(consumer: Consumer, producer: ProducerProcess) -> None:
    ticket = producer.put(TORN_KEY, 16384)
    producer.ask("scribble", TORN_KEY)
    for _ in range(10):
        pull = consumer.pull(ticket)
        if pull.state is PullState.READY:
            assert consumer.rows(pull) == rows_of(TORN_KEY, 16384)
            consumer.forget(pull)
        else:
            assert failed(pull, 502, "the checksum differs: torn or corrupted block")
    producer.ask("rest")
    assert failed(consumer.pull(ticket), 502, "the checksum differs")
    producer.ask("release_all")
