"""What every transport does when a side of it dies, stands still or comes back: a clear end, and no memory lost."""

import signal
from contextlib import ExitStack

from consumer_shim.pull import PullState
from tests.integration.transports.kit import Consumer, ProducerProcess, eventually, failed, send
from tests.integration.transports.producer_process import rows_of

KEY = "a" * 64


def test_a_producer_that_was_killed(consumer: Consumer, mortal: ProducerProcess) -> None:
    ticket = mortal.put(KEY, 100)
    assert consumer.works_with(mortal)
    mortal.kill()
    assert failed(consumer.pull(ticket), 503, "does not give the embedding: UNAVAILABLE")
    assert consumer.store.used_bytes == 0


def test_a_producer_that_is_killed_between_lease_and_read(consumer: Consumer, mortal: ProducerProcess) -> None:
    ticket = mortal.put(KEY, 100)

    def kill() -> None:
        send(signal.SIGKILL, *mortal.agent_pids)  # it ends with its owner, but might serve one more read
        mortal.kill()

    with consumer.before_each_read(kill):
        pull = consumer.pull(ticket)
    assert failed(pull, 503, f"pulling over {consumer.transport} failed")
    assert consumer.store.used_bytes == 0


def test_a_producer_that_is_killed_during_reads(consumer: Consumer, mortal: ProducerProcess) -> None:
    tickets = [mortal.put(f"{number:064x}", 900) for number in range(32)]
    pulls = [consumer.start(ticket) for ticket in tickets]
    assert eventually(lambda: any(pull.state is PullState.READING for pull in pulls) or pulls[-1].is_over)
    mortal.kill()
    assert eventually(lambda: all(pull.is_over for pull in pulls))
    for pull in pulls:
        if pull.state is PullState.READY:
            assert consumer.rows(pull) == rows_of(pull.ticket.key, 900)
            consumer.forget(pull)
        else:
            assert failed(pull, 503, "UNAVAILABLE|pulling over .* failed")
    assert consumer.settles()


def test_a_producer_that_stops_during_reads(consumer: Consumer, mortal: ProducerProcess) -> None:
    tickets = [mortal.put(f"{number:064x}", 900) for number in range(32)]
    assert consumer.works_with(mortal)
    pids = [mortal.pid, *mortal.agent_pids]
    pulls = [consumer.start(ticket, timeout_s=2.0) for ticket in tickets]
    assert eventually(lambda: any(pull.is_over for pull in pulls))
    send(signal.SIGSTOP, *pids)
    try:
        assert eventually(lambda: all(pull.is_over for pull in pulls))
        for pull in pulls:
            if pull.state is PullState.READY:
                assert consumer.rows(pull) == rows_of(pull.ticket.key, 900)
                consumer.forget(pull)
            else:
                assert failed(pull, 504, "DEADLINE_EXCEEDED|timed out")
    finally:
        send(signal.SIGCONT, *pids)
    assert consumer.settles()
    assert consumer.works_with(mortal)


def test_a_producer_that_was_started_again(consumer: Consumer, mortal: ProducerProcess) -> None:
    old = mortal.put(KEY, 100)
    assert consumer.works_with(mortal)
    mortal.kill()
    with ProducerProcess(consumer.transport, port=mortal.port) as second:
        second.put(KEY, 100)
        assert failed(consumer.pull(old), 503, "EPOCH_MISMATCH: .*started again")
        assert consumer.works_with(second)


def test_a_producer_that_is_started_again_between_lease_and_read(consumer: Consumer, mortal: ProducerProcess) -> None:
    ticket = mortal.put(KEY, 100)
    with ExitStack() as stack:

        def restart() -> None:
            mortal.kill()
            stack.enter_context(ProducerProcess(consumer.transport, port=mortal.port)).put(KEY, 100)

        with consumer.before_each_read(restart):
            pull = consumer.pull(ticket)
    assert failed(pull, 503, f"pulling over {consumer.transport} failed")
    assert consumer.store.used_bytes == 0
