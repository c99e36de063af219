"""What processes take, on real ones."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.memory import busy_seconds, command, cpu_seconds, memory, parent, thread_cpu_seconds, tree

MIB = 1 << 20


@contextmanager
def child(code: str) -> Iterator[int]:
    """A Python that has run `code` and said 'ready'."""
    words = [sys.executable, "-c", f"{code}\nprint('ready', flush=True)\ninput()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline()
        yield process.pid
        process.communicate(b"\n")


def test_memory_that_is_used_is_counted() -> None:
    with child("") as small, child(f"used = b'x' * {64 * MIB}") as large:
        sizes = memory([small, large])
    for kind in ("unique_bytes", "proportional_bytes"):
        assert getattr(sizes[large], kind) - getattr(sizes[small], kind) == pytest.approx(64 * MIB, rel=0.1)


FORKED = f"""
import os
used = b"x" * {64 * MIB}
reader, writer = os.pipe()
if not os.fork():
    os.close(writer)
    os.read(reader, 1)  # until the other ends
    os._exit(0)
"""


def test_what_forks_share_is_unique_to_none_and_counted_once() -> None:
    with child(FORKED) as pid:
        sizes = memory([pid, *tree(pid)])
    assert len(sizes) == 2
    assert sum(one.unique_bytes for one in sizes.values()) < 32 * MIB
    assert 64 * MIB < sum(one.proportional_bytes for one in sizes.values()) < 96 * MIB


def test_a_process_that_has_ended_takes_nothing() -> None:
    with child("") as pid:
        pass
    assert memory([pid]) == {}
    assert cpu_seconds([pid]) == 0
    assert thread_cpu_seconds([pid]) == {}


def test_a_tree_has_children_of_children_and_not_its_root() -> None:
    code = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)"
    with child(code) as pid:
        found = tree(os.getpid())
        (grandchild,) = tree(pid)
        assert {pid, grandchild} <= {*found}
        assert os.getpid() not in found
        assert (parent(pid), parent(grandchild)) == (os.getpid(), pid)


def test_what_is_computed_is_counted_by_thread() -> None:
    code = "import time, threading\nwhile time.process_time() < 0.3: pass"
    before_s = busy_seconds()
    with child(code) as pid:
        assert cpu_seconds([pid]) >= 0.25
        ((name, seconds),) = thread_cpu_seconds([pid]).items()
    assert name.endswith(f" {pid}, main thread")
    assert seconds >= 0.25
    assert busy_seconds() - before_s >= 0.2


def test_a_command_is_named_without_folders() -> None:
    with child("") as pid:
        assert "/" not in command(pid)
    with child("open('/proc/self/comm', 'w').write('a name')") as pid:
        assert command(pid) == "a name"
    helper = "from multiprocessing import resource_tracker; resource_tracker.ensure_running()"
    with child(helper) as pid:
        deadline_s = time.monotonic() + 30
        while command(*tree(pid)) != "resource_tracker" and time.monotonic() < deadline_s:
            time.sleep(0.05)  # it is a copy of its parent at first
        assert command(*tree(pid)) == "resource_tracker"
