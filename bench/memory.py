"""What the processes of a server take: memory that is theirs alone, and time of the cores. Linux only."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
KIB = 1024
HELPERS = ("resource_tracker", "forkserver", "spawn_main")
"""Of Python's `multiprocessing`, started as code on a command line."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """Every process that `root` started, and theirs in turn; not `root` itself."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, level = [], [root]
    while level:
        level = [child for pid in level for child in children.get(pid, ())]
        found += level
    return found


def parent(pid: int) -> int:
    """The process that started it; `OSError` if it has ended."""
    return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of one process."""

    unique_bytes: int
    """What no other process has mapped, and would be free if it ended (its unique set size)."""
    proportional_bytes: int
    """That, and of what several have mapped an equal share each: forks share what they were born with."""


def memory(pids: list[int]) -> dict[int, Memory]:
    """By process, of those that are there. Files in shared memory that nobody has mapped are nobody's."""
    return {pid: found for pid in pids if (found := _memory(pid)) is not None}


def cpu_seconds(pids: list[int]) -> float:
    """What they have computed since their start, to a hundredth of a second each."""
    return sum(_cpu_seconds(PROC / str(pid) / "stat") for pid in pids)


def thread_cpu_seconds(pids: list[int]) -> dict[str, float]:
    """As `cpu_seconds`, by process and thread."""
    found: dict[str, float] = {}
    for task in (task for pid in pids for task in _tasks(pid)):
        pid = task.parts[2]
        thread = "main thread" if task.name == pid else f"thread {task.name}, {_read(task / 'comm').strip()}"
        found[f"{command(int(pid))} {pid}, {thread}"] = _cpu_seconds(task / "stat")
    return found


def busy_seconds() -> float:
    """What all cores of this machine have computed since it runs."""
    fields = [int(word) for word in _read(PROC / "stat").splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / TICKS_PER_S


def command(pid: int) -> str:
    """What a process is, in two words at most and without folders: the name that it gave itself, or its command."""
    words = [word.rpartition("/")[2] for word in _read(PROC / str(pid) / "cmdline").replace("\0", " ").split()]
    name = _read(PROC / str(pid) / "comm").strip()
    if not any(word.startswith(name) for word in words):
        return name
    helper = next((name for name in HELPERS if any(name in word for word in words)), "")
    return helper or " ".join(words[1:3] if words[0].startswith("python") else words[:2])


def _memory(pid: int) -> Memory | None:
    lines = (line.split() for line in _read(PROC / str(pid) / "smaps_rollup").splitlines()[1:])
    sizes = {words[0]: int(words[1]) * KIB for words in lines}
    unique = sum(size for name, size in sizes.items() if name.startswith("Private_"))
    return Memory(unique_bytes=unique, proportional_bytes=sizes["Pss:"]) if sizes else None


def _cpu_seconds(stat: Path) -> float:
    fields = _read(stat).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def _parents() -> Iterator[tuple[int, int]]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _read(entry / "stat").rpartition(")")[2].split()):
            yield int(entry.name), int(fields[1])


def _tasks(pid: int) -> list[Path]:
    try:
        return list((PROC / str(pid) / "task").iterdir())
    except OSError:  # it has ended
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended, or another user's
        return ""
