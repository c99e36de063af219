"""TCP ports on which a process, or one below it, waits for connections; from /proc."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_LISTEN = "0A"
_LOOPBACK = "0100007F"
"""127.0.0.1, also within an IPv6 address."""


def listening(pid: int) -> dict[int, bool]:
    """The ports of `pid` and its descendants, each with whether other hosts reach it."""
    found: dict[int, bool] = {}
    rows = {row[9]: row[1].split(":") for row in _rows() if row[3] == _LISTEN}
    for inode in {inode for one in _family(pid) for inode in _sockets(one)} & rows.keys():
        address, port = rows[inode]
        found[int(port, 16)] = found.get(int(port, 16), False) or not address.endswith(_LOOPBACK)
    return found


def _rows() -> Iterator[list[str]]:
    for name in ("tcp", "tcp6"):
        for line in (_PROC / "net" / name).read_text().splitlines()[1:]:
            yield line.split()


def _family(pid: int) -> set[int]:
    """The process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for link in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if target.startswith("socket:["):
                    yield target[8:-1]
