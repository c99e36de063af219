"""Processes that tests and the demo start, and that never outlive them.

A `Service` is one command under `supervisor.py`, with a log file and a question that
tells whether it is ready. Even a SIGKILL of this process ends its services.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

SUPERVISOR = Path(__file__).with_name("supervisor.py")
LOGS_DIR = Path(__file__).parents[2] / ".cache" / "logs"
MARK = "EC_KIT_RUN"
"""Environment variable that marks all processes started from here, whatever they start in turn."""
MARK_VALUE = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
LOG_TAIL_LINES = 25
POLL_S = 0.2
SUPERVISOR_MARGIN_S = 45.0  # what the supervisor may take beyond the grace period


class ServiceError(Exception):
    """A service did not become ready; the text holds the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a service ended."""

    code: int
    """Its exit code; 128 and the signal's number where a signal ended it."""
    killed: tuple[str, ...]
    """The processes (id and command) that did not end by themselves in time."""


class Service:
    """One command, running from `start` to `stop`; as a context manager, ready inside it.

    The log keeps stdout and stderr, and starts anew with each `start`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        ready: Callable[[], bool],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        logs: Path = LOGS_DIR,
        grace_s: float = 20.0,
        start_timeout_s: float = 240.0,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = logs / f"{name}.log"
        self._ready = ready
        self._env = dict(env or {})
        self._cwd = cwd
        self._grace_s = grace_s
        self._start_timeout_s = start_timeout_s
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._lifeline = self._report = -1
        self._started_s = 0.0
        self.was_ready = False
        """Whether it ever answered since its start. Before that vLLM is deaf to SIGTERM, and has nothing to finish."""
        self.pid = 0
        """The command's own process, 0 while it is not started."""

    def start(self) -> None:
        """Start the command and return at once."""
        assert self._supervisor is None, f"{self.name} is started already"
        lifeline, self._lifeline = os.pipe()
        self._report, report = os.pipe()
        self._started_s = time.monotonic()
        self.was_ready = False
        self._supervisor = self._launch(lifeline, report)
        os.close(lifeline)
        os.close(report)
        self.pid = int(_read_line(self._report) or 0)

    def _launch(self, lifeline: int, report: int) -> subprocess.Popen[bytes]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [str(lifeline), str(report), str(self._grace_s), *self.command]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._cwd,
                env=os.environ | self._env | {MARK: MARK_VALUE},
                pass_fds=(lifeline, report),
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def poll_ready(self) -> bool:
        """Whether it answers. Raises `ServiceError` once there is no hope that it will."""
        if self._ready():
            self.was_ready = True
            return True
        if not self.running:
            raise ServiceError(f"{self.name} ended before it was ready{self._log_tail()}")
        if self.age_s > self._start_timeout_s:
            raise ServiceError(f"{self.name} was not ready after {self.age_s:.0f} s{self._log_tail()}")
        return False

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started_s

    def wait_ready(self) -> None:
        """Block until the service answers. Raises `ServiceError`."""
        while not self.poll_ready():
            time.sleep(POLL_S)

    def kill(self) -> None:
        """End the command the way a crash would: SIGKILL, no clean-up of its own."""
        os.kill(self.pid, signal.SIGKILL)

    def wait_ended(self, within_s: float) -> bool:
        """Waits for it to end by itself; whether it did."""
        deadline_s = time.monotonic() + within_s
        while self.running and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return not self.running

    def request_stop(self) -> None:
        """Begin to stop without waiting, so that several can stop at the same time."""
        if self._lifeline >= 0:
            if self.was_ready:
                _write_if_read(self._lifeline)
            os.close(self._lifeline)
            self._lifeline = -1

    def stop(self) -> Ending | None:
        """End the service and all its processes; None where it was not running any more."""
        if self._supervisor is None:
            return None
        self.request_stop()
        ending = Ending(code=self._wait_supervisor(self._supervisor), killed=self._killed())
        self._supervisor, self.pid = None, 0
        return ending

    def _wait_supervisor(self, supervisor: subprocess.Popen[bytes]) -> int:
        try:
            return supervisor.wait(self._grace_s + SUPERVISOR_MARGIN_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            return supervisor.wait()

    def _killed(self) -> tuple[str, ...]:
        lines = []
        while line := _read_line(self._report):
            lines.append(line)
        os.close(self._report)
        return tuple(lines)

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"; the end of {self.log}:", *(f"    {line}" for line in lines)])

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _write_if_read(fd: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the service has ended by itself
        os.write(fd, b".")


def _read_line(fd: int) -> str:
    """A line without its end, byte by byte, so that nothing behind it is taken; '' at the end."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()
