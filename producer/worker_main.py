"""What runs in each process of a worker pool, and the messages between the two: a JSON head and raw frames, no pickle.

A process that a hostile file has taken over can say what it likes: nothing that it says is more than data of bounded
size.
"""

import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from typing import Any

from producer import logs
from producer.logs import LogSettings
from producer.wire.origin import NOBODY, Origin, work_for

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 4 << 20
MAX_FRAMES = 4096
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
"""Signals by which code ends itself; others come from outside."""
_LENGTH = struct.Struct("!I")
_AHEAD_BYTES = 4096
_MAX_VECTORS = 512
"""Buffers for one system call; Linux allows twice as many."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_NAME = b"worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A task or its answer: `fields` are what JSON can hold; `frames` are contiguous buffers, bytearrays on arrival."""

    fields: dict[str, Any] = field(default_factory=dict)
    frames: Sequence[Any] = field(default=(), repr=False)
    error: str = ""
    """The name of an exception that the work raised, if there was one."""
    last: bool = False
    """Whether the process wants to be replaced after this answer."""
    origin: Origin = NOBODY
    """Whom a task is for."""


class MessageError(ValueError):
    """What came is no message, or is larger than allowed."""


Work = Callable[[Message], Message]
"""Does one task. An exception is reported by its name; the process goes on."""


class Channel:
    """Messages over a stream socket, in few system calls. For one thread.

    The socket blocks; where it has timeouts (`SO_RCVTIMEO`, `SO_SNDTIMEO`), it is asked after each whether to go on.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        check: Callable[[], object] = lambda: None,
        idle: Callable[[], object] = lambda: None,
    ) -> None:
        """`check` is called before each system call, `idle` when one has timed out. Both may raise to give up."""
        self._socket = connection
        self._check = check
        self._idle = idle
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0

    @property
    def has_more(self) -> bool:
        """Whether more was read than the message that was received last."""
        return self._begin < self._end

    def send(self, message: Message) -> None:
        """Writes all of `message`."""
        left = _parts(message)
        while left:
            self._check()
            try:
                num_bytes = self._socket.sendmsg(left[:_MAX_VECTORS])
            except BlockingIOError:
                self._idle()
            else:
                left = _rest(left, num_bytes)

    def receive(self, max_bytes: int) -> Message:
        """As `receive`. EOFError: the other end is closed."""
        content, frames = _receive_head(self._fill, max_bytes)
        self._fill(*frames)
        return Message(**content, frames=frames)

    def _fill(self, *buffers: bytearray) -> None:
        """What is small is read together with what comes after it."""
        left = self._take([memoryview(buffer) for buffer in buffers if buffer])
        while left:
            self._check()
            if sum(map(len, left)) < _AHEAD_BYTES:
                self._begin, self._end = 0, self._read([self._ahead], 0)
                left = self._take(left)
            else:
                left = _rest(left, self._read(left[:_MAX_VECTORS], socket.MSG_WAITALL))

    def _take(self, views: list[memoryview]) -> list[memoryview]:
        """Fills `views` with what was read ahead; what is left of them."""
        for index, view in enumerate(views):
            size = min(len(view), self._end - self._begin)
            view[:size] = self._ahead[self._begin : self._begin + size]
            self._begin += size
            if size < len(view):
                return [view[size:], *views[index + 1 :]]
        return []

    def _read(self, views: list[memoryview], flags: int) -> int:
        try:
            num_bytes = self._socket.recvmsg_into(views, 0, flags)[0]
        except BlockingIOError:
            self._idle()
            return 0
        if not num_bytes:
            raise EOFError("it died")
        return num_bytes


def send(message: Message, write: Callable[[Any], object]) -> None:
    """Writes `message`; `write` takes a buffer of bytes and writes all of it."""
    for part in _parts(message):
        write(part)


def _parts(message: Message) -> list[Any]:
    """The buffers of bytes that make `message`."""
    views = [memoryview(frame) for frame in message.frames]
    head: dict[str, Any] = {"fields": message.fields, "frames": [view.nbytes for view in views]}
    head |= {"error": message.error, "last": message.last, "origin": message.origin.to_params()}
    text = json.dumps(head).encode()
    return [_LENGTH.pack(len(text)) + text, *(view.cast("B") for view in views if view.nbytes)]  # empty ones have none


def _rest(parts: list[Any], num_bytes: int) -> list[Any]:
    """What is left of `parts` after their first `num_bytes`."""
    for index, part in enumerate(parts):
        if num_bytes < len(part):
            return [memoryview(part)[num_bytes:], *parts[index + 1 :]]
        num_bytes -= len(part)
    return []


def receive(fill: Callable[[bytearray], object], max_bytes: int) -> Message:
    """Reads a message of no more than `max_bytes` in all frames; `fill` reads as many bytes as the buffer has.

    Raises:
        MessageError: it is malformed or too large.
    """
    content, frames = _receive_head(fill, max_bytes)
    for frame in frames:
        fill(frame)
    return Message(**content, frames=frames)


def _receive_head(fill: Callable[[bytearray], object], max_bytes: int) -> tuple[dict[str, Any], list[bytearray]]:
    """A message but for its frames, for which there is room."""
    length = bytearray(_LENGTH.size)
    fill(length)
    (num_bytes,) = _LENGTH.unpack(length)
    if num_bytes > MAX_HEAD_BYTES:
        raise MessageError(f"a head of {num_bytes} bytes; at most {MAX_HEAD_BYTES} are allowed")
    text = bytearray(num_bytes)
    fill(text)
    content, sizes = _parse(text)
    if sum(sizes) > max_bytes:
        raise MessageError(f"frames of {sum(sizes)} bytes; at most {max_bytes} are allowed")
    return content, [bytearray(size) for size in sizes]


def _parse(text: bytearray) -> tuple[dict[str, Any], list[int]]:
    """A message's fields but for its frames, and their sizes."""
    try:
        head = json.loads(text)
        fields, sizes, error, last = (head[name] for name in ("fields", "frames", "error", "last"))
    except (ValueError, LookupError, TypeError, RecursionError):
        raise MessageError("the head is not that of a message") from None
    kinds = ((fields, dict), (sizes, list), (error, str), (last, bool))
    if not all(type(value) is kind for value, kind in kinds):
        raise MessageError("a field of the head has the wrong type")
    if len(sizes) > MAX_FRAMES or not all(type(size) is int and size >= 0 for size in sizes):
        raise MessageError(f"the frames' sizes are not at most {MAX_FRAMES} natural numbers")
    origin = Origin.from_params(head.get("origin"))
    return {"fields": fields, "error": error, "last": last, "origin": origin}, sizes


def run(
    connection: socket.socket,
    make: Callable[..., Work],
    args: Sequence[Any],
    memory_bytes: int,
    log: LogSettings | None = None,
) -> None:
    """The process: makes its work, says that it is ready, and answers tasks until the pool ends it.

    Args:
        connection: to the pool.
        make: called with `args` once.
        memory_bytes: what work may allocate beyond what the process has once it is ready; more is a MemoryError, or
            whatever a library makes of it.
        log: how this process is to log; by default it is left as it is.
    """
    _end_with_pool()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it drains first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not fill the disk, nor take the time to
    if log is not None:
        logs.configure_child(log)
    work = make(*args)
    for number in CRASHES:
        signal.signal(number, signal.SIG_DFL)  # libraries print a trace first, which takes seconds or hangs
    base_bytes = _data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (base_bytes + memory_bytes,) * 2)
    channel = Channel(connection)
    with contextlib.suppress(EOFError, ConnectionError):  # the pool has gone
        channel.send(Message())
        while True:
            answer = _do(work, channel.receive(sys.maxsize))
            channel.send(replace(answer, last=_keeps_more_than(base_bytes + memory_bytes // 2)))


def _do(work: Work, request: Message) -> Message:
    try:
        with work_for(request.origin):
            return work(request)
    except Exception as error:
        with work_for(request.origin):
            logger.error("a task failed: %s", logs.stack_of(error))
        return Message(error=type(error).__name__)


def _keeps_more_than(num_bytes: int) -> bool:
    """Whether what earlier tasks left behind would be held against the next ones."""
    if _data_bytes() <= num_bytes:
        return False
    gc.collect()
    return _data_bytes() > num_bytes


def _data_bytes() -> int:
    """What RLIMIT_DATA counts, private writable mappings, and the main thread's stack."""
    fd = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(fd, 256).split()[5]) * resource.getpagesize()
    finally:
        os.close(fd)


def _end_with_pool() -> None:
    """Has the kernel kill this process with the fork server, and the fork server end with the pool's process.

    It would live as long as any process holds its pipe; and only SIGKILL reaches a process that is stopped.
    """
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NAME, _NAME)  # a fork's command line is its parent's
