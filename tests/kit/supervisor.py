"""Runs one command so that nothing of it outlives whoever asked for it.

    python -I -S supervisor.py LIFELINE REPORT GRACE_S COMMAND…

LIFELINE is the reading end of a pipe that the asker holds open. A byte on it means
stop: SIGTERM to the command, as an init system would send it, a grace period, then
SIGKILL to all that is left. Its end without a byte (the asker is gone, however it went,
or sees nothing to wait for) means the same in a hurry. Every process that the command
starts, daemons included, stays below this one (it is their 'subreaper'), so none gets
away. A scratch folder, the command's TMPDIR, goes with it.

REPORT is the writing end of a pipe: the command's process id first, then one line for
each process that had to be killed.

It stands alone (standard library only) and has one thread, so forking is safe.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
HURRY_S = 2.0
STRAGGLER_GRACE_S = 10.0  # a process with a large library loaded takes seconds to end on a busy machine
KILL_TIMEOUT_S = 10.0
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
"""Python's helper that unlinks shared memory once its users are gone, so it has to go last."""

stop_requested = False


def main(arguments: list[str]) -> int:
    lifeline, report, grace_s = int(arguments[0]), int(arguments[1]), float(arguments[2])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _request_stop)
    signal.signal(signal.SIGHUP, _request_stop)
    with tempfile.TemporaryDirectory(prefix="ec-", ignore_cleanup_errors=True) as scratch:
        leader = Leader(arguments[3:], scratch, grace_s)
        _tell(report, str(leader.pid))
        code = leader.attend(lifeline)
        for line in _end_stragglers(min(leader.grace_s, STRAGGLER_GRACE_S)):
            _tell(report, line)
    return code


class Leader:
    """The command itself: the first process below the supervisor, leader of a session of its own."""

    def __init__(self, command: list[str], scratch: str, grace_s: float) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, scratch)
        self.code: int | None = None
        self.grace_s = grace_s

    def attend(self, lifeline: int) -> int:
        """Wait until the command ends or is to be stopped; its exit code, negative for a signal."""
        while not self.ended() and not stop_requested:
            if select.select([lifeline], [], [], POLL_S)[0]:
                self.grace_s = self.grace_s if os.read(lifeline, 1) else min(self.grace_s, HURRY_S)
                break
        if not self.ended():
            os.kill(self.pid, signal.SIGTERM)
            _wait(self.ended, self.grace_s)
        return -signal.SIGKILL if self.code is None else self.code

    def ended(self) -> bool:
        for pid, code in _reap():
            if pid == self.pid:
                self.code = code
        return self.code is not None


def _become(command: list[str], scratch: str) -> None:
    """In the forked child: turn into the command, or say why not."""
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, os.environ | {"TMPDIR": scratch})
    except BaseException as error:  # the child must never return into the supervisor's code
        os.write(2, f"cannot run {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _end_stragglers(grace_s: float) -> list[str]:
    """Wait a moment for what is left below us, then kill it; one line for each killed process."""
    _wait(_alone, grace_s)
    killed = _kill_all(lambda name: RESOURCE_TRACKER not in name)
    _wait(_alone, grace_s if killed else 0.0)
    return list((killed | _kill_all(lambda name: True)).values())


def _kill_all(chosen: Callable[[str], bool]) -> dict[int, str]:
    """Kill what is below us and chosen by its command, until it is gone; the commands by process."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while not _alone() and time.monotonic() < deadline:
        names = {pid: _name(pid) for pid in _descendants()}
        found = {pid: f"{pid} {name}" for pid, name in names.items() if chosen(name)}
        if not found:
            break
        killed = found | killed
        for pid in found:
            _kill(pid)
        time.sleep(POLL_S)
    return killed


def _alone() -> bool:
    for _ in _reap():
        pass
    return not _descendants()


def _reap() -> list[tuple[int, int]]:
    ended = []
    try:
        while (entry := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((entry[0], os.waitstatus_to_exitcode(entry[1])))
    except ChildProcessError:
        pass
    return ended


def _descendants() -> set[int]:
    """Every live process below this one; a zombie counts until its parent has reaped it."""
    parents = {int(entry.name): _parent(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= level
    return found


def _parent(entry: Path) -> int:
    try:
        stat = (entry / "stat").read_text()
    except OSError:  # it ended while we looked
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def _name(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "(ended)"
    return " ".join(command.decode(errors="replace").replace("\0", " ").split())[:120]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _tell(report: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody is left to read it
        os.write(report, f"{line}\n".encode())


def _request_stop(number: int, frame: object) -> None:
    global stop_requested
    stop_requested = True


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)  # as a shell reports a signal
