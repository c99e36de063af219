"""One process of a worker pool, from the pool's side: starts it, asks it, sees that it died or hangs, ends it."""

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver
from typing import Any

from producer import logs, worker_main
from producer.worker_main import Channel, Message, MessageError, Work

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How often a process that says nothing is looked at; one that is found stopped twice in a row is lost."""
_REAP_S = 5.0


class WorkerLostError(Exception):
    """The process died, or is as good as dead."""


class WorkerTimeoutError(Exception):
    """The process did not answer in time."""


class PoolClosedError(Exception):
    """The pool was closed before an answer came."""


class Launcher:
    """Starts the processes of one pool, each a fork of a clean process of one thread that has imported `preload`."""

    def __init__(
        self,
        make: Callable[..., Work],
        args: Sequence[Any],
        *,
        memory_bytes: int,
        preload: Sequence[str],
        start_timeout_s: float,
        is_closed: Callable[[], bool],
    ) -> None:
        """As for `WorkerPool`; `is_closed` ends all waiting."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._make = make
        self._args = args
        self.memory_bytes = memory_bytes
        self.start_timeout_s = start_timeout_s
        self.is_closed = is_closed

    def process(self, theirs: socket.socket) -> Any:
        """A process that is not started yet, at the other end of the pool's socket."""
        args = (theirs, self._make, self._args, self.memory_bytes, logs.settings())
        return self._context.Process(target=worker_main.run, args=args, name="worker", daemon=True)


class Worker:
    """One process, which is ready for tasks once this is made. For one thread."""

    _lock = threading.Lock()
    """Held where multiprocessing looks at its children, as it does at each start: it is not thread-safe there."""

    def __init__(self, launcher: Launcher) -> None:
        """
        Raises:
            WorkerLostError, WorkerTimeoutError: it did not start.
            PoolClosedError: the pool was closed meanwhile.
        """
        self._launcher = launcher
        self._num_stopped = 0
        self._exit_code: int | None = None
        self._call_s = 0.0
        self._socket, theirs = socket.socketpair()
        self._channel = Channel(self._socket, check=self._check_time, idle=self._check_wait)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._process = launcher.process(theirs)
        try:
            with _loss(), theirs, self._lock, _fork_server_answers_within(launcher.start_timeout_s):
                self._process.start()
            self.pid = int(self._process.pid)
            self._allow(launcher.start_timeout_s)
            with _loss():
                self._channel.receive(launcher.memory_bytes)
        except BaseException:
            self.end()
            raise

    @property
    def is_idle(self) -> bool:
        """Whether the process lives and has said nothing unasked."""
        return not (self._channel.has_more or self._poll.poll(0))

    def ask(self, request: Message, timeout_s: float) -> Message:
        """The process's answer.

        Raises:
            WorkerTimeoutError: there was none in time.
            WorkerLostError: the process died, was stopped, or said what is no answer.
            PoolClosedError: the pool was closed meanwhile.
        """
        self._allow(timeout_s)
        with _loss():
            self._channel.send(request)
            return self._channel.receive(self._launcher.memory_bytes)

    def check_runs(self) -> None:
        """To be called each `POLL_S` while nothing comes. Raises WorkerLostError if it is stopped a second time."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat", "rb") as file:
            is_stopped = file.read().rpartition(b") ")[2][:1] == b"T"
            self._num_stopped = self._num_stopped + 1 if is_stopped else 0
        if self._num_stopped > 1:
            raise WorkerLostError("it was stopped by a signal")

    def end(self) -> int:
        """Kills the process, if it has not ended yet; its exit code, that of multiprocessing."""
        if self._exit_code is None:
            self._socket.close()
            self._exit_code = self._kill()
        return self._exit_code

    def _kill(self) -> int:
        if self._process.pid is None:  # it never started
            return -signal.SIGKILL
        if not connection.wait([self._process.sentinel], 0):
            self._process.kill()
            connection.wait([self._process.sentinel], _REAP_S)
        with self._lock:
            exit_code: int | None = self._process.exitcode
            if exit_code is not None:
                self._process.close()
        return -signal.SIGKILL if exit_code is None else exit_code

    def _allow(self, timeout_s: float) -> None:
        """What follows has `timeout_s`; a call of the socket that takes longer than `POLL_S` is looked into."""
        self._timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s
        call_s = min(POLL_S, timeout_s)
        if call_s != self._call_s:
            self._call_s = call_s
            value = struct.pack("@ll", int(call_s), int(call_s % 1 * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def _check_time(self) -> None:
        if time.monotonic() > self._until_s:
            raise WorkerTimeoutError(f"no answer within {self._timeout_s:g} s")

    def _check_wait(self) -> None:
        if self._launcher.is_closed():
            raise PoolClosedError("the pool was closed")
        self.check_runs()


@contextlib.contextmanager
def _loss() -> Iterator[None]:
    """Makes a WorkerLostError of what a dead process, or one that speaks nonsense, looks like."""
    try:
        yield
    except (OSError, EOFError, MessageError) as error:
        raise WorkerLostError(str(error) or type(error).__name__) from None


@contextlib.contextmanager
def _fork_server_answers_within(seconds: float) -> Iterator[None]:
    """Ends a fork server that is frozen, for which a start would wait for ever; the next start makes a new one."""
    timer = threading.Timer(seconds, _kill_fork_server)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill_fork_server() -> None:
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        logger.error("the fork server does not answer and is ended")
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
