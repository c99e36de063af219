"""What our services left behind: processes, shared memory, listening ports.

    before = snapshot()
    …
    assert not leftovers(before)

Other programs of the same machine may come and go meanwhile; theirs are not counted.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit.ports import handed_out_ports
from tests.kit.processes import MARK, MARK_VALUE
from tests.kit.supervisor import RESOURCE_TRACKER

SHARED_MEMORY = Path("/dev/shm")
TRACKED = ("sem.mp-", "psm_")  # the names that Python's multiprocessing gives
LISTEN = "0A"  # the state's number in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Snapshot:
    shared_memory: frozenset[Path]
    segments: frozenset[str]
    """Ids of System V segments, which have no file (NIXL's UCX uses such)."""


def snapshot() -> Snapshot:
    return Snapshot(frozenset(_shared_memory()), frozenset(_idle_segments()))


def leftovers(before: Snapshot) -> list[str]:
    """One line for each thing of ours that is still there."""
    return [
        *(f"process {pid}: {_command(pid)}" for pid in sorted(our_processes())),
        *(f"shared memory {path}" for path in _new_shared_memory(before)),
        *(f"System V shared memory segment {segment}" for segment in sorted(_idle_segments() - before.segments)),
        *(f"port {port} is still listening" for port in sorted(handed_out_ports() & _listening())),
    ]


def our_processes() -> set[int]:
    """Live processes that carry this run's mark, so every one that our services started."""
    mark = f"{MARK}={MARK_VALUE}".encode()
    return {pid for pid in _pids() if pid != os.getpid() and mark in _read(f"/proc/{pid}/environ").split(b"\0")}


def _new_shared_memory(before: Snapshot) -> list[Path]:
    """Entries that appeared since, except those that may be somebody else's."""
    new = {path for path in _shared_memory() if path not in before.shared_memory}
    if not new:
        return []
    ours = our_processes()
    others = [pid for pid in _pids() if pid not in ours]
    used = {path for pid in others for path in _used_shared_memory(pid)}
    tracked = {path for path in new if path.name.startswith(TRACKED) and _any_tracker(others)}
    return sorted(path for path in new - used - tracked if path.exists())


def _any_tracker(pids: list[int]) -> bool:
    """Whether one of them unlinks other processes' entries at its end, without using them itself."""
    return any(RESOURCE_TRACKER in _command(pid) for pid in pids)


def _shared_memory() -> Iterator[Path]:
    return (Path(folder, name) for folder, _, names in os.walk(SHARED_MEMORY) for name in names)


def _idle_segments() -> set[str]:
    """System V segments that no process is attached to; a used one belongs to whoever uses it."""
    rows = [row.split() for row in _read("/proc/sysvipc/shm").decode().splitlines()[1:]]
    return {row[1] for row in rows if row[6] == "0"}


def _used_shared_memory(pid: int) -> Iterator[Path]:
    """The entries that a process has mapped or open."""
    for line in _read(f"/proc/{pid}/maps").decode(errors="replace").splitlines():
        _, found, name = line.partition(f"{SHARED_MEMORY}/")
        if found:
            yield SHARED_MEMORY / name
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            yield Path(os.readlink(entry))
    except OSError:  # ended meanwhile, or another user's
        return


def _listening() -> set[int]:
    rows = [row.split() for table in ("tcp", "tcp6") for row in _read(f"/proc/net/{table}").decode().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN}


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: int) -> str:
    return " ".join(_read(f"/proc/{pid}/cmdline").decode(errors="replace").replace("\0", " ").split())[:120]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # the process ended meanwhile, or is another user's
        return b""
