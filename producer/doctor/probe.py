"""Asks in a process of its own what may hang, crash or print: drivers, libraries, models. See `probes`."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import IO, Any

PROBE_S = 120.0
"""What one question may take: importing vLLM from a cold disk takes a minute."""
_END_S = 2.0
_MAX_ANSWER_BYTES = 1 << 16
"""What a pipe holds, so that nobody has to read while the process runs."""
_LAST_BYTES = 2000


class ProbeError(Exception):
    """There is no answer; the sentence says why."""


class Prober:
    """Asks each question once. For one thread."""

    def __init__(self) -> None:
        self._answers: dict[str, Any] = {}

    def ask(self, name: str, *arguments: Any, timeout_s: float = PROBE_S) -> Any:
        """What function `name` of `probes` returns for `arguments`, which JSON can say.

        Raises:
            ProbeError: it raised, crashed, or did not end in time.
        """
        question = json.dumps([name, *arguments])
        if question not in self._answers:
            self._answers[question] = _ask(question, timeout_s)
        answer = self._answers[question]
        if "error" in answer:
            raise ProbeError(answer["error"])
        return answer["value"]


def _ask(question: str, timeout_s: float) -> dict[str, Any]:
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_NONBLOCK)
    command = [sys.executable, "-m", "producer.doctor.probes", str(writing), question]
    try:
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(writing,), start_new_session=True
            )
            why = _wait(process, timeout_s)
            return _answer(reading) or {"error": why or f"it ended without an answer{_last_line(log)}"}
    finally:
        os.close(reading)
        os.close(writing)


def _wait(process: "subprocess.Popen[bytes]", timeout_s: float) -> str:
    """Why there will be no answer; "" where the process ended by itself. Its own processes end with it."""
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"it did not answer within {timeout_s:g} s"
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits in the kernel cannot be ended
            process.wait(_END_S)
    return f"it crashed with {signal.Signals(-status).name}" if status < 0 else ""


def _answer(reading: int) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(os.read(reading, _MAX_ANSWER_BYTES))
    except (BlockingIOError, ValueError):
        return {}
    return answer


def _last_line(log: IO[bytes]) -> str:
    """What it printed last, for people."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
    lines = log.read().decode("utf-8", "replace").split("\n")
    return "".join(f": {line.strip()[:300]}" for line in [line for line in lines if line.strip()][-1:])
