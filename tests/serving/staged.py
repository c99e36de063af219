"""A consumer of the shim's parts whose pulls can be caught at each stage, here or in a process that is there to die.

    python -m tests.serving.staged TRANSPORT

The process takes a JSON list a line, [ticket, stage, seconds], and forks a child for each. The child says that it is
there, pulls, says when it is at the stage and stops itself (SIGSTOP); once it goes on, it says how the pull ended. What
it says are JSON lists, its process id first.
"""

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from consumer_shim.client import Lease, Producer
from consumer_shim.pull import Pull, PullState
from consumer_shim.tickets import PullTicket
from producer.transport.shm import ShmReader
from producer.wire.contract import SHM_TRANSPORT
from tests.integration.transports.kit import Consumer

STAGES = ("before acquire", "before read", "reading", "before release")
SLACK_S = 5.0
"""What a pull, or the release after it, may take beyond its time."""
READING_S = 0.003
"""About what a read takes."""


class StagedConsumer(Consumer):
    """Runs one pull at a time, and something else at one of its stages."""

    def __init__(self, transport: str) -> None:
        super().__init__(transport)
        if transport == SHM_TRANSPORT:
            self.library = ShmReader(self.region)  # type: ignore[assignment]
        self.before_read = self._before_read
        self.at: Callable[[str], Any] = lambda stage: None

    def run(self, ticket: PullTicket, timeout_s: float, stage: str, act: Callable[[], Any]) -> Pull | None:
        """A pull to its end, with `act` at `stage`, on the pull's thread; None where it hangs."""
        self.at = lambda now: act() if now == stage else None
        block = self.store.reserve(ticket.key, ticket.shape.block_bytes)
        pull = Pull(ticket, block, time.monotonic() + timeout_s)
        thread = threading.Thread(target=self.puller.run, args=[pull], daemon=True)
        thread.start()
        thread.join(timeout_s + SLACK_S)
        return None if thread.is_alive() else pull

    def _before_read(self) -> None:
        self.at("before read")
        threading.Timer(random.uniform(0, READING_S), lambda: self.at("reading")).start()

    def _producer(self, address: str) -> Producer:
        return self.producers.setdefault(address, _StagedProducer(address, self))


class _StagedProducer(Producer):
    """Tells a consumer where its pull is."""

    def __init__(self, address: str, consumer: StagedConsumer) -> None:
        super().__init__(address)
        self._consumer = consumer

    def acquire(self, **request: Any) -> Lease:
        self._consumer.at("before acquire")
        return super().acquire(**request)

    def release(self, lease_id: str, timeout_s: float) -> None:
        self._consumer.at("before release")
        super().release(lease_id, timeout_s)


def ending(consumer: StagedConsumer, pull: Pull | None) -> tuple[str, str, str]:
    """How a pull ended: a code, a digest of its rows if it is ready, and the sentence of its failure; frees it."""
    if pull is None:
        return "HUNG", "", ""
    if pull.state is PullState.READY:
        found = digest(consumer.rows(pull))
        consumer.forget(pull)
        return "READY", found, ""
    assert pull.failure is not None
    return str(pull.failure.http_status), "", pull.failure.message


def digest(rows: bytes) -> str:
    return hashlib.sha256(rows).hexdigest()


def _say(*words: str) -> None:
    os.write(1, json.dumps([os.getpid(), *words]).encode() + b"\n")


def _child(transport: str, ticket: PullTicket, stage: str, timeout_s: float) -> None:
    _say("pid")
    lock = threading.Lock()
    over = False

    def stand_still() -> None:
        with lock:
            if not over:
                _say("stage", stage)
                os.kill(os.getpid(), signal.SIGSTOP)

    with StagedConsumer(transport) as consumer:
        words = ending(consumer, consumer.run(ticket, timeout_s, stage, stand_still))
        with lock:
            over = True  # a read may have ended before it was to stand still
        _say("end", *words)


def main(transport: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while line := sys.stdin.readline():
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ticket, stage, timeout_s = json.loads(line)
            with suppress(BrokenPipeError):
                _child(transport, PullTicket(**ticket), stage, timeout_s)
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
