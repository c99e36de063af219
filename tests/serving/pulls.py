"""Faults in the middle of pulls: a thousand of them, over each transport, on both sides, at every stage."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from consumer_shim.tickets import PullTicket
from producer.embedding_pool import LEASE_MARGIN_S
from tests.integration.transports.kit import BOUND_S, ProducerProcess, send
from tests.integration.transports.producer_process import rows_of
from tests.kit.processes import MARK, MARK_VALUE
from tests.serving.service import Usage, wait_for
from tests.serving.staged import SLACK_S, STAGES, StagedConsumer, digest, ending
from tests.serving.table import Record

TRANSPORTS = ("grpc", "nixl", "mooncake")
AGENTS = ("nixl", "mooncake")
LEASE_S = 2.0
PULL_S = 3.0
SHORT_PULL_S = 0.3
LONG_FREEZE_S = 0.6
"""Longer than a short pull, which then has to fail in time."""
RECOVERED_S = 10.0
"""By when a channel to a producer that was started again works; it tries every two seconds."""
KILLED = 0.7
"""Share of consumers that are killed rather than frozen."""
NUM_ROWS = (100, 900)
FAILURES = ("502", "503", "504")
"""HTTP statuses of failures that say what is wrong; any other one is wrong itself."""


class Tickets:
    """New embeddings in a producer's pool."""

    def __init__(self) -> None:
        self._number = 0

    def put(self, producer: ProducerProcess, *num_rows: int) -> PullTicket:
        """One of so many rows; what killed consumers leave pinned must not fill the pool."""
        self._number += 1
        return producer.put(f"{self._number:064x}", random.choice(num_rows or NUM_ROWS))


def rows_digest(ticket: PullTicket) -> str:
    """What a pull of `ticket` has to give."""
    return digest(rows_of(ticket.key, ticket.num_rows))


def judge(record: Record, expected: str, code: str, found: str, sentence: str) -> None:
    """One pull's end: ready with the rows of the expected digest, or a failure that says why."""
    record.tried += 1
    if code == "HUNG":
        record.hangs(f"a pull had not ended {SLACK_S:.0f} s after its time")
        return
    record.ended(code)
    record.expect(code in ("READY", *FAILURES), f"{code}: {sentence}")
    if code == "READY":
        record.expect(found == expected, "a pull gave other bytes")
    else:
        record.expect(bool(sentence), f"{code} without a reason")


def check_given_back(record: Record, producer: ProducerProcess, consumer: StagedConsumer | None = None) -> None:
    """All leases end, all blocks can be evicted, and no landing memory stays behind."""
    bound_s = LEASE_S + LEASE_MARGIN_S + SLACK_S

    def num_leases() -> int:
        producer.ask("release", producer.put("f" * 64, 1).lease_id)  # the pool ends leases when it grants one
        return int(producer.ask("num_leases"))

    if not wait_for(lambda: not num_leases(), bound_s):
        record.leaks(num_leases(), f"leases held {bound_s:.0f} s after the last pull")
    record.leaks(int(not producer.ask("evict", "f" * 64)), "a block cannot be evicted")
    if consumer is not None:
        record.leaks(int(not consumer.settles()), "landing memory in use after the last pull")


class Freeze:
    """Stops processes when it is called, lets them go on after a while, and at the end for sure."""

    def __init__(self, pids: list[int], for_s: float) -> None:
        self._pids = pids
        self._lock = threading.Lock()
        self._over = False
        self._thaw = threading.Timer(for_s, send, [signal.SIGCONT, *pids])

    def __call__(self) -> None:
        with self._lock:
            if not self._over:
                send(signal.SIGSTOP, *self._pids)
                self._thaw.start()

    def __enter__(self) -> "Freeze":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            self._thaw.cancel()
            send(signal.SIGCONT, *self._pids)


def producer_freezes(record: Record, transport: str, times: int) -> None:
    """The producer, its agent or both stand still at a stage, now and then for longer than the pull may take."""
    tickets = Tickets()
    usage = [Usage.of(os.getpid())] * 2
    with ProducerProcess(transport, lease_s=LEASE_S) as producer, StagedConsumer(transport) as consumer:
        for number, stage in enumerate(islice(cycle(STAGES), times)):
            if number == times // 2:
                usage = [Usage.of(os.getpid()), Usage.of(producer.pid)]
            ticket, long = tickets.put(producer), number % 13 == 5
            victims = [[producer.pid], [producer.pid, *producer.agent_pids], producer.agent_pids or [producer.pid]]
            with Freeze(random.choice(victims), LONG_FREEZE_S if long else random.uniform(0, 0.03)) as freeze:
                pull = consumer.run(ticket, SHORT_PULL_S if long else PULL_S, stage, freeze)
            judge(record, rows_digest(ticket), *ending(consumer, pull))
        usage[0].grown(Usage.of(os.getpid()), record, "the consumer")
        usage[1].grown(Usage.of(producer.pid), record, "the producer")
        check_given_back(record, producer, consumer)


def producer_kills(record: Record, transport: str, times: int) -> None:
    """The producer is killed at a stage and started again: the pull ends, old tickets fail, new ones work."""
    tickets = Tickets()
    with StagedConsumer(transport) as consumer, ExitStack() as stack:
        producer = stack.enter_context(ProducerProcess(transport, lease_s=LEASE_S))
        for stage in islice(cycle(STAGES), times):
            ticket = tickets.put(producer)
            pids = producer.agent_pids

            def kill(producer: ProducerProcess = producer, pids: list[int] = pids) -> None:
                send(signal.SIGKILL, *pids, producer.pid)

            judge(record, rows_digest(ticket), *ending(consumer, consumer.run(ticket, PULL_S, stage, kill)))
            kill()
            producer.kill()
            producer = stack.enter_context(ProducerProcess(transport, port=producer.port, lease_s=LEASE_S))
            fresh = tickets.put(producer)
            if not wait_for(lambda ticket=fresh: _pulled(record, consumer, ticket), RECOVERED_S):
                record.hangs(
                    f"no pull from a producer that was started again {RECOVERED_S:.0f} s ago", record.tried == 0
                )
            record.expect(not _pulled(record, consumer, ticket), "a ticket of an earlier life was served")
        check_given_back(record, producer, consumer)


def _pulled(record: Record, consumer: StagedConsumer, ticket: PullTicket) -> bool:
    """One pull without a fault; whether it is ready."""
    end = ending(consumer, consumer.run(ticket, PULL_S, "", bool))
    judge(record, rows_digest(ticket), *end)
    return end[0] == "READY"


class Consumers:
    """`staged.py` as a process, one child at a time."""

    def __init__(self, transport: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.serving.staged", transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what is buffered, `select` does not see
            env=os.environ | {MARK: MARK_VALUE},
        )

    def __enter__(self) -> "Consumers":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(BOUND_S)
        self._process.stdout.close()

    def begin(self, ticket: PullTicket, stage: str, timeout_s: float) -> int:
        """Starts a pull in a child; its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([asdict(ticket), stage, timeout_s]).encode() + b"\n")
        pid, *_ = self._line(BOUND_S)
        return int(pid)

    def heard(self, pid: int, timeout_s: float) -> list[str]:
        """The child's next words; ["end", "HUNG", "", ""] where it says nothing."""
        heard, *words = self._line(timeout_s) or [pid, "end", "HUNG", "", ""]
        assert heard == pid, f"{heard} speaks, {pid} was expected to"
        return words

    def _line(self, timeout_s: float) -> list[Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        words: list[Any] = json.loads(self._process.stdout.readline()) if readable else []
        return words


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


def consumer_faults(record: Record, transport: str, times: int) -> None:
    """The consumer is killed at a stage, or stands still for a while: the producer gets all back."""
    tickets = Tickets()
    with ProducerProcess(transport, lease_s=LEASE_S) as producer, Consumers(transport) as consumers:
        usage = Usage.of(producer.pid)
        for number, stage in enumerate(islice(cycle(STAGES), times)):
            usage = Usage.of(producer.pid) if number == times // 2 else usage
            ticket = tickets.put(producer, min(NUM_ROWS))
            pid = consumers.begin(ticket, stage, PULL_S)
            heard = consumers.heard(pid, BOUND_S)
            if heard[0] == "stage":
                wait_for(lambda pid=pid: is_stopped(pid), SLACK_S, 0.005)
                time.sleep(random.uniform(0, 0.05))
                if random.random() < KILLED:
                    send(signal.SIGKILL, pid)
                    record.tried += 1
                    record.ended("KILLED")
                    continue
                send(signal.SIGCONT, pid)
                heard = consumers.heard(pid, PULL_S + 2 * SLACK_S)
            judge(record, rows_digest(ticket), *heard[1:])
            if heard[1] == "HUNG":
                send(signal.SIGKILL, pid)
        usage.grown(Usage.of(producer.pid), record, "the producer")
        check_given_back(record, producer)


FAULTS: tuple[tuple[Callable[[Record, str, int], None], dict[str, int]], ...] = (
    (producer_freezes, {"grpc": 280, "nixl": 240, "mooncake": 240}),
    (producer_kills, {"grpc": 8, "nixl": 8, "mooncake": 8}),
    (consumer_faults, {"grpc": 200, "nixl": 16, "mooncake": 16}),
)
"""How often each at scale 1: a thousand in all, and more of what costs less."""
