"""A network transport in a process of its own, supervised: a library's abort takes down the agent, not the encoder.

The agent maps the same region as its owner and talks with it in small JSON messages over a socket pair; bytes of blocks
never pass through here. It ends when its owner does. When it dies or says nothing for long, reads in flight fail, and
it is started again.
"""

import base64
import contextlib
import json
import logging
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from producer.memory.region import SharedRegion
from producer.transport.base import BlockDescriptor, Endpoint, Outlet, Reader, TransportError, TransportUnavailableError

logger = logging.getLogger(__name__)

MAX_UNSETTLED = 64
"""Reads past their deadline that may still write; with so many, the transport is not used until some end."""
MAX_MESSAGE_BYTES = 1 << 17
BEAT_S = 1.0
"""How often an agent says that it lives."""
_SILENT_S = 5.0
"""Without a word for so long, it is not up."""
_FROZEN_S = 20.0
"""Without a word for so long, it is ended; a library may take seconds to meet a peer."""
_STDERR = 2  # where a library's chatter belongs
_START_TIMEOUT_S = 30.0
_BACKOFF_S = (0.1, 0.5, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """One life of an agent: its name, the metadata to reach it, and where the region lies in its address space."""

    name: str
    metadata: bytes
    address: int


@dataclass(slots=True)
class _Read:
    """A read in flight, from the owner's side."""

    offset: int
    ended: threading.Event = field(default_factory=threading.Event)
    error: str = ""


class AgentProcess:
    """The owner's side of an agent: starts it, keeps it up, passes reads on. Thread-safe."""

    def __init__(self, backend: str, role: str, region: SharedRegion, options: Mapping[str, str]) -> None:
        """Starts an agent that runs `backend` ("module:class") as "outlet" or "reader" over `region`.

        Args:
            backend: where the library is; it is imported in the agent only.
            role: "outlet" or "reader".
            region: memory that peers read, or that reads land in; it must outlive this object.
            options: the library's settings, as its backend names them.

        Raises:
            TransportUnavailableError: the library cannot be used on this machine.
            TransportError: the agent did not start.
        """
        self._arguments = (backend, role, json.dumps(dict(options)))
        self._region = region
        self._lock = threading.Lock()
        self._reads: dict[int, _Read] = {}
        self._next_id = 0
        self._closed = False
        self._stop = threading.Event()
        self._heard_s = 0.0
        self.identity: AgentIdentity | None = None
        """The agent as it is now; None while it is down."""
        self._start()
        self._supervisor = threading.Thread(target=self._supervise, name=f"{role}-agent", daemon=True)
        self._supervisor.start()

    @property
    def pid(self) -> int:
        """Process id of the agent, for tests and diagnosis."""
        return self._process.pid

    @property
    def is_up(self) -> bool:
        """Whether the agent runs, and has said so lately."""
        return self.identity is not None and time.monotonic() - self._heard_s < _SILENT_S

    def read(self, block: BlockDescriptor, offset: int, timeout_s: float) -> None:
        """As `Reader.read`."""
        read = self._post(block, offset)
        if not read.ended.wait(timeout_s):
            raise TransportError(f"no end of the read within {timeout_s:.1f} s", settled=False, timed_out=True)
        if read.error:
            raise TransportError(read.error)

    def is_settled(self, offset: int) -> bool:
        """As `Reader.is_settled`."""
        with self._lock:
            return all(read.offset != offset for read in self._reads.values())

    def close(self) -> None:
        """Ends the agent; reads in flight fail."""
        self._closed = True
        self._stop.set()
        with contextlib.suppress(OSError):  # it is down and being started again
            self._socket.shutdown(socket.SHUT_RDWR)
        self._supervisor.join(timeout=10)

    def _post(self, block: BlockDescriptor, offset: int) -> _Read:
        message = {
            "peer": block.peer,
            "metadata": base64.b64encode(block.peer_metadata).decode(),
            "address": block.address,
            "offset": offset,
            "num_bytes": block.num_bytes,
        }
        with self._lock:
            if self.identity is None:
                raise TransportError("the transport's agent is down; it is being started again")
            if len(self._reads) >= MAX_UNSETTLED:
                raise TransportError(f"{MAX_UNSETTLED} reads are in flight or past their deadline already")
            read_id = self._next_id = self._next_id + 1
            read = self._reads[read_id] = _Read(offset)
            try:
                self._socket.send(json.dumps({"id": read_id, **message}).encode(), socket.MSG_DONTWAIT)
            except OSError as error:
                del self._reads[read_id]
                raise TransportError(f"the transport's agent takes no work: {error.strerror}") from None
        return read

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fds = (self._region.fd, theirs.fileno())
            command = [sys.executable, "-m", "producer.transport.agent_main", *self._arguments, *map(str, fds)]
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=_STDERR)
        self._socket.settimeout(_START_TIMEOUT_S)
        try:
            hello = self._receive()
        except OSError:
            hello = None
        self._socket.settimeout(None)
        match hello:
            case {"name": str(name), "metadata": str(metadata), "address": int(address)}:
                with contextlib.suppress(ValueError):
                    self.identity = AgentIdentity(name, base64.b64decode(metadata), address)
                    self._heard_s = time.monotonic()
                    return
        self._end_process()
        error = _error(hello or {}) or "no answer"
        if (hello or {}).get("unavailable"):
            raise TransportUnavailableError(error)
        raise TransportError(f"the transport's agent did not start: {error}")

    def _supervise(self) -> None:
        """Takes answers; when they end, fails what is in flight and starts the agent again."""
        while True:
            self._take_answers()
            self.identity = None
            self._end_process()
            self._fail_all("the transport's agent died")
            if self._closed or not self._restart():
                return

    def _take_answers(self) -> None:
        while self._hears() and (answer := self._receive()) is not None:
            if "error" not in answer:  # it lives
                continue
            if "id" not in answer:
                logger.error("the agent of %s fails: %s", self._arguments[0], _error(answer))
                continue
            with self._lock:
                read = self._reads.pop(answer["id"], None) if isinstance(answer["id"], int) else None
            if read is not None:
                read.error = _error(answer)
                read.ended.set()

    def _hears(self) -> bool:
        """Waits for the agent's next word, or its end; False if it says nothing for too long."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if poll.poll(_FROZEN_S * 1000):
            self._heard_s = time.monotonic()
            return True
        logger.error("the agent of %s is frozen", self._arguments[0])
        return False

    def _restart(self) -> bool:
        """Tries until the agent is up; False once this object is closed."""
        attempt = 0
        while not self._stop.wait(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]):
            try:
                self._start()
                logger.warning("the agent of %s was started again", self._arguments[0])
                return True
            except (TransportError, TransportUnavailableError) as error:
                logger.error("%s", error)
                attempt += 1
        return False

    def _receive(self) -> dict[str, Any] | None:
        """The agent's next message; None at its end, and for what is none."""
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
            answer = json.loads(data) if data else None
        except (ConnectionError, ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def _fail_all(self, why: str) -> None:
        with self._lock:
            reads = list(self._reads.values())
            self._reads.clear()
        for read in reads:
            read.error = why
            read.ended.set()

    def _end_process(self) -> None:
        self._socket.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _error(answer: Mapping[str, Any]) -> str:
    """What an agent says went wrong; "" where nothing did."""
    error = answer.get("error", "")
    return error if isinstance(error, str) else "it makes no sense"


class AgentOutlet(Outlet):
    """A producer's end that lives in an agent."""

    def __init__(self, name: str, agent: AgentProcess) -> None:
        self.name = name
        self.agent = agent

    def describe(self) -> Endpoint:
        identity = self.agent.identity
        if identity is None:
            raise TransportError("the transport's agent is down; it is being started again")
        return Endpoint(base=identity.address, peer=identity.name, metadata=identity.metadata)

    @property
    def is_up(self) -> bool:
        return self.agent.is_up

    def close(self) -> None:
        self.agent.close()


class AgentReader(Reader):
    """A consumer's end that lives in an agent."""

    def __init__(self, name: str, agent: AgentProcess) -> None:
        self.name = name
        self.agent = agent

    def read(self, block: BlockDescriptor, offset: int, timeout_s: float) -> None:
        self.agent.read(block, offset, timeout_s)

    def is_settled(self, offset: int) -> bool:
        return self.agent.is_settled(offset)

    def close(self) -> None:
        self.agent.close()
