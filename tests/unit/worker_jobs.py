"""What the processes of a pool do in tests: work, and everything that goes wrong in one."""

import gc
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from producer.worker_main import Message

MIB = 1 << 20
_kept: list[bytearray] = []


def make() -> Callable[[Message], Message]:
    return _do


def make_surviving() -> Callable[[Message], Message]:
    """As libraries do that say something when the process crashes, and then hang."""
    for number in (signal.SIGSEGV, signal.SIGABRT):
        signal.signal(number, lambda *_: None)
    return _do


def make_noting_pid(folder: Path) -> Callable[[Message], Message]:
    """Takes time to start, at first: until there is a file `go`."""
    (folder / str(os.getpid())).touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return _do


def make_if(allowed: Path) -> Callable[[Message], Message]:
    """Fails to start until a file exists."""
    if not allowed.exists():
        raise RuntimeError("not yet")
    return _do


def _do(request: Message) -> Message:
    return _JOBS[request.fields["do"]](request)


def _echo(request: Message) -> Message:
    fields = request.fields | {"pid": os.getpid(), "sizes": [len(frame) for frame in request.frames]}
    return Message(fields=fields, frames=request.frames)


def _die(request: Message) -> Message:
    """By a signal, as often as `files` can be made one after the other; at each call if there are none."""
    for name in request.fields.get("files", [None]):
        if name is None or not Path(name).exists():
            if name is not None:
                Path(name).touch()
            os.kill(os.getpid(), request.fields["signal"])
            time.sleep(60)
    return _echo(request)


def _crash_natively(request: Message) -> Message:
    import ctypes

    ctypes.string_at(0)
    raise AssertionError("unreachable")


def _exit(request: Message) -> Message:
    os._exit(request.fields["status"])


def _raise(request: Message) -> Message:
    raise KeyError("secret")


def _sleep(request: Message) -> Message:
    Path(request.fields["begun"]).touch()
    time.sleep(request.fields["seconds"])
    return _echo(request)


def _spin(request: Message) -> Message:
    """Holds the interpreter's lock, and ignores what can be ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def _allocate(request: Message) -> Message:
    size = request.fields["mib"] * MIB
    if request.fields.get("keep"):
        _kept.append(bytearray(size))
    else:
        bytearray(size)
    return _echo(request)


def _say(request: Message) -> Message:
    """Sends bytes that are no answer, as a process would that a file has taken over."""
    (connection,) = (one for one in gc.get_objects() if isinstance(one, socket.socket) and one.fileno() >= 0)
    connection.sendall(bytes(request.frames[0]))
    if request.fields.get("hangs"):
        time.sleep(60)
    return _echo(request)


_JOBS: dict[str, Callable[[Message], Any]] = {
    "echo": _echo,
    "die": _die,
    "crash natively": _crash_natively,
    "exit": _exit,
    "raise": _raise,
    "sleep": _sleep,
    "spin": _spin,
    "allocate": _allocate,
    "say": _say,
}
