"""The two sides of the conformance suite: a producer's process, and a consumer made of the shim's own parts."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from typing_extensions import Self

from consumer_shim.client import Lease, Producer
from consumer_shim.pull import Pull, Puller, PullState
from consumer_shim.tickets import PullTicket
from producer.memory.block_store import BlockStore
from producer.memory.region import SharedRegion
from producer.transport import registry
from producer.transport.agent import AgentReader
from producer.transport.base import BlockDescriptor, Reader
from producer.transport.stream import StreamReader
from producer.wire.block import HEADER_BYTES
from tests.integration.transports.producer_process import DTYPE, OPTIONS, WIDTH, rows_of
from tests.kit.ports import free_port
from tests.kit.processes import MARK, MARK_VALUE

POOL_BYTES = 8 << 20
REGION_BYTES = 32 << 20
BOUND_S = 60.0
"""Nothing here may take longer, on a busy machine too."""


def eventually(condition: Callable[[], Any], bound_s: float = BOUND_S) -> bool:
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def failed(pull: Pull, http_status: int, sentence: str) -> bool:
    """Whether the pull failed with this status, and this pattern in its sentence."""
    assert pull.failure is not None, pull.state
    assert pull.failure.http_status == http_status, pull.failure
    assert re.search(sentence, pull.failure.message), pull.failure
    return True


class ProducerProcess:
    """`producer_process.py` from start to end; as a context manager, ready inside it."""

    def __init__(self, *transports: str, port: int = 0, lease_s: float = 60.0, env: dict[str, str] | None = None):
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        arguments = [str(self.port), str(POOL_BYTES), str(lease_s), *transports]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.transports.producer_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {MARK: MARK_VALUE} | (env or {}),
        )

    def __enter__(self) -> Self:
        assert self._answer() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def agent_pids(self) -> list[int]:
        """The processes of its outlets' agents that are up."""
        return list(self.ask("agents"))

    def put(self, key: str, num_rows: int) -> PullTicket:
        """An embedding in its pool, and the ticket for it."""
        ticket = self.ask("put", key, num_rows)
        return PullTicket(modality="image", width=WIDTH, dtype=DTYPE, address=self.address, **ticket)

    def ask(self, command: str, *arguments: Any) -> Any:
        """Has the process do one of `Commands`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        """SIGKILL, and all of it gone."""
        self._process.kill()
        self._process.wait(BOUND_S)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], BOUND_S)
        assert readable, "the producer does not answer"
        line = self._process.stdout.readline()
        assert line, "the producer has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["result"]


class Consumer:
    """The landing side, of the shim's own parts: a region, a store, a reader for each producer, and a puller."""

    def __init__(self, transport: str) -> None:
        self.region = SharedRegion.create("test-landing", REGION_BYTES)
        self.store = BlockStore(REGION_BYTES)
        self.producers: dict[str, Producer] = {}
        self.library: AgentReader | None = None
        """The reader of a transport that has a library."""
        if transport in registry.LIBRARY_TRANSPORTS:
            reader = registry.open_reader(transport, self.region, OPTIONS[transport])
            assert isinstance(reader, AgentReader)
            self.library = reader
        self.transport = transport
        self.read_timeout_s = BOUND_S
        """The most that a read may take, whatever its pull may."""
        self.before_read: Callable[[], Any] = lambda: None
        self.redirect: Callable[[BlockDescriptor], BlockDescriptor] = lambda block: block
        """What to read instead of the block that a lease was given for."""
        self.puller = Puller(self.region, self.store, self._producer, self._reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.library is not None:
            self.library.close()
        for producer in self.producers.values():
            producer.close()
        self.region.close()

    def start(self, ticket: PullTicket, timeout_s: float = BOUND_S) -> Pull:
        """A pull of `ticket` on a thread of its own, with a block in the region."""
        block = self.store.reserve(ticket.key, ticket.shape.block_bytes)
        pull = Pull(ticket, block, time.monotonic() + timeout_s)
        threading.Thread(target=self.puller.run, args=[pull], daemon=True).start()
        return pull

    def pull(self, ticket: PullTicket, timeout_s: float = BOUND_S) -> Pull:
        """As `start`, but to its end."""
        pull = self.start(ticket, timeout_s)
        assert eventually(lambda: pull.is_over), f"the pull hangs in {pull.state}"
        return pull

    @contextmanager
    def before_each_read(self, act: Callable[[], Any]) -> Iterator[None]:
        """Inside it, `act` comes between the lease and the read of every pull."""
        self.before_read = act
        yield
        self.before_read = lambda: None

    def acquire(self, ticket: PullTicket) -> Lease:
        """A lease, as a pull takes it."""
        return self._producer(ticket.address).acquire(
            key=ticket.key, epoch=ticket.epoch, lease_id="", transport=self.transport, timeout_s=BOUND_S
        )

    def rows(self, pull: Pull) -> bytes:
        """What lies in the region as the embedding's rows."""
        start = pull.block.offset + HEADER_BYTES
        return bytes(self.region.view[start : start + pull.ticket.shape.payload_bytes])

    def forget(self, pull: Pull) -> None:
        """Gives the memory of a pull that is ready back."""
        self.store.free(pull.block)

    def works_with(self, producer: ProducerProcess) -> bool:
        """Whether an embedding of `producer` arrives whole."""
        key = "b" * 64
        pull = self.pull(producer.put(key, 100))
        assert pull.state is PullState.READY, pull.failure
        whole = self.rows(pull) == rows_of(key, 100)
        self.forget(pull)
        return whole

    def settles(self) -> bool:
        """Whether all quarantined memory is freed in time."""

        def settle() -> bool:
            self.puller.settle()
            return self.store.used_bytes == 0

        return eventually(settle)

    def _producer(self, address: str) -> Producer:
        if address not in self.producers:
            self.producers[address] = Producer(address)
        return self.producers[address]

    def _reader(self, address: str) -> Reader:
        reader = self.library or StreamReader(self.region, self._producer(address).stub.Fetch)
        return _Interrupted(reader, self)


class _Interrupted(Reader):
    """Lets a test act between the lease and the read, and shorten it; the read itself is the real one."""

    def __init__(self, reader: Reader, consumer: Consumer) -> None:
        self.name = reader.name
        self._reader = reader
        self._consumer = consumer

    def read(self, block: BlockDescriptor, offset: int, timeout_s: float) -> None:
        self._consumer.before_read()
        self._reader.read(self._consumer.redirect(block), offset, min(timeout_s, self._consumer.read_timeout_s))

    def is_settled(self, offset: int) -> bool:
        return self._reader.is_settled(offset)

    def close(self) -> None:
        self._reader.close()


def send(number: signal.Signals, *pids: int) -> None:
    """A signal to each of these processes that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
