"""A fork server that is a fork: real processes, real signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0
ROOT = Path(__file__).parents[2]


class Owner:
    """A process that is told what to do: `tests.unit.fork_jobs`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.unit.fork_jobs"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def do(self, name: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def owner() -> Iterator[Owner]:
    one = Owner()
    yield one
    with one.process:
        one.process.kill()


def eventually(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def state(pid: int) -> str:
    """As /proc has it; "" of a process that has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except FileNotFoundError:
        return ""


def is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def test_a_worker_has_what_was_made_before_the_fork(owner: Owner) -> None:
    server = owner.do("start")
    told = owner.do("ask")
    assert told["state"] == "as changed"
    assert parent_of(told["pid"]) == server
    assert parent_of(server) == owner.process.pid
    assert told["command"] == Path(f"/proc/{owner.process.pid}/cmdline").read_text(), "it was started anew"
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in (server, told["pid"])]
    assert names == ["forkserver", "worker"]


def test_a_fork_has_no_file_of_its_parents_and_no_thread(owner: Owner) -> None:
    port = owner.do("port")
    owner.do("start")
    told = owner.do("ask")
    assert told["threads"] == 1
    opened = [path for fd, path in told["files"].items() if int(fd) > 2 and path != os.devnull]
    assert len(opened) <= 4, opened  # its socket to the pool, and multiprocessing's
    owner.process.kill()
    owner.process.wait()
    eventually(lambda: not is_alive(told["pid"]))
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))  # without SO_REUSEADDR


def test_a_listening_socket_does_not_outlive_its_owner_in_a_fork(owner: Owner) -> None:
    owner.do("start")
    told = owner.do("ask")
    inodes = {path for path in told["files"].values() if path.startswith("socket:")}
    theirs = {os.readlink(one) for one in Path(f"/proc/{owner.process.pid}/fd").iterdir()}
    assert not inodes & theirs


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_parent_leaves_no_process(owner: Owner, stopped: bool) -> None:
    pids = [owner.do("start"), owner.do("ask")["pid"]]
    if stopped:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    owner.process.kill()
    eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_fork_server_that_ends_is_replaced(owner: Owner, number: signal.Signals) -> None:
    first = owner.do("start")
    worker = owner.do("ask")["pid"]
    os.kill(first, number)
    eventually(lambda: not is_alive(worker))
    told = owner.do("ask")
    assert told["state"] == "as imported"  # by a process that was started anew
    assert parent_of(told["pid"]) == owner.do("server") != first


def test_a_worker_that_dies_is_replaced_by_a_fork(owner: Owner) -> None:
    owner.do("start")
    first = owner.do("ask")["pid"]
    os.kill(first, signal.SIGKILL)
    told = owner.do("ask")
    assert told["pid"] != first
    assert told["state"] == "as changed"


def test_it_is_forked_once(owner: Owner) -> None:
    assert owner.do("start") == owner.do("start")
