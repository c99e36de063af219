"""A small process that makes JSON lines of what the service, its libraries and its children print.

With `--log-format json` it reads stdin and writes stdout until all who hold the other end have gone. Lines that are
ours already pass as they are. It takes no notice of signals to a group: it is to see the end of the others.
"""

import json
import os
import signal
import time
from collections.abc import Iterator

from producer.logs import MAX_LINE_BYTES, line_of, utc
from producer.wire.log_text import clean

_READ_BYTES = 1 << 16
_MOST = 1 << 14
"""Bytes of a printed line that are looked at."""


def relay(read_fd: int, write_fd: int) -> None:
    """Until the end of `read_fd`, or of `write_fd`'s reader."""
    for line in _lines(read_fd):
        text = _json_of(line)
        if text:
            left = memoryview(text.encode() + b"\n")
            while left:
                left = left[os.write(write_fd, left) :]


def _lines(fd: int) -> Iterator[bytes]:
    """What comes, by line; of a longer one than `_MOST` the beginning. A progress bar's turns are lines, too."""
    begun = b""
    while data := os.read(fd, _READ_BYTES):
        *whole, begun = (begun + data).replace(b"\r", b"\n").split(b"\n")
        yield from whole
        if len(begun) > _MOST:
            begun = begun[: _MOST + 1]
    yield begun


def _json_of(line: bytes) -> str:
    if _is_ours(line):
        return line.decode()
    text = clean(line[:_MOST].decode("utf-8", "replace").strip())
    if not text:
        return ""
    return line_of({"time": utc(time.time()), "level": "info", "logger": "printed", "message": text})


def _is_ours(line: bytes) -> bool:
    if not line.startswith(b'{"time": ') or len(line) >= MAX_LINE_BYTES or not line.isascii():
        return False
    try:
        content = json.loads(line)
    except ValueError:
        return False
    return isinstance(content, dict) and {"time", "level", "logger", "message"} <= content.keys()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    relay(0, 1)


if __name__ == "__main__":
    main()
