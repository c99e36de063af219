"""Processes that crash, hang, are stopped and take too much memory: real ones, with real signals."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from producer.worker_main import Message
from producer.worker_pool import WorkerDiedError, WorkerPool, WorkError
from producer.worker_process import PoolClosedError, WorkerTimeoutError
from tests.unit import worker_jobs
from tests.unit.worker_jobs import MIB

WAIT_S = 60.0
MEMORY_BYTES = 256 * MIB
CRASHES = [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL]
PoolOf = Callable[..., WorkerPool]


@pytest.fixture
def pool_of() -> Iterator[PoolOf]:
    """Makes pools, and closes them at the end."""
    pools: list[WorkerPool] = []

    def make(num_workers: int = 1, make: Any = worker_jobs.make, args: Any = (), **settings: Any) -> WorkerPool:
        settings = {"timeout_s": WAIT_S, "memory_bytes": MEMORY_BYTES, "preload": ["pytest"]} | settings
        pools.append(WorkerPool(num_workers, make, args, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def begin(pool: WorkerPool, do: str, *frames: bytes, **fields: Any) -> "Future[Message]":
    return pool.submit(Message(fields={"do": do, **fields}, frames=frames))


def done(pool: WorkerPool, do: str, *frames: bytes, **fields: Any) -> Message:
    return begin(pool, do, *frames, **fields).result(WAIT_S)


def pid_of(pool: WorkerPool) -> int:
    return int(done(pool, "echo").fields["pid"])


def eventually(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] not in b"ZX"
    except FileNotFoundError:
        return False


def fork_server() -> int:
    server: Any = forkserver._forkserver
    return int(server._forkserver_pid)


# Work


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0, 70_000), (40 * MIB,)])
def test_a_task_comes_back_as_it_was_sent(pool_of: PoolOf, sizes: tuple[int, ...]) -> None:
    frames = [os.urandom(size) for size in sizes]
    answer = done(pool_of(), "echo", *frames, text="ä", number=0.1, none=None)
    assert answer.frames == frames
    assert all(type(frame) is bytearray for frame in answer.frames)
    expected = {"do": "echo", "text": "ä", "number": 0.1, "none": None, "sizes": list(sizes)}
    assert answer.fields == expected | {"pid": answer.fields["pid"]}


def test_tasks_are_done_at_the_same_time_by_as_many_processes_as_there_are(pool_of: PoolOf, tmp_path: Path) -> None:
    pool = pool_of(2)
    begun = [tmp_path / "0", tmp_path / "1"]
    slow = [begin(pool, "sleep", seconds=0.3, begun=str(path)) for path in begun]
    assert len({future.result(WAIT_S).fields["pid"] for future in slow}) == 2


def test_a_task_says_when_a_process_has_taken_it(pool_of: PoolOf, tmp_path: Path) -> None:
    pool = pool_of()
    first = pool.submit(Message(fields={"do": "sleep", "seconds": 0.2, "begun": str(tmp_path / "begun")}))
    second = pool.submit(Message(fields={"do": "echo"}))
    assert second.begun_s is None
    second.result(WAIT_S)
    assert first.begun_s is not None
    assert second.begun_s is not None
    assert second.begun_s - first.begun_s >= 0.2


def test_an_exception_is_said_by_its_name_and_the_process_goes_on(pool_of: PoolOf) -> None:
    pool = pool_of()
    before = pid_of(pool)
    with pytest.raises(WorkError, match=r"^KeyError$"):
        done(pool, "raise")
    assert pid_of(pool) == before


# Deaths


@pytest.mark.parametrize("number", CRASHES)
def test_a_task_that_crashes_each_process_is_at_fault(pool_of: PoolOf, number: signal.Signals) -> None:
    pool = pool_of()
    with pytest.raises(WorkerDiedError, match=f"ended with {number.name} and {number.name}") as caught:
        done(pool, "die", signal=number)
    assert caught.value.crashed
    assert pid_of(pool) > 0
    assert pool.num_deaths == 2


def test_a_crash_ends_the_process_at_once_whatever_libraries_do_about_it(pool_of: PoolOf) -> None:
    with pytest.raises(WorkerDiedError, match="ended with SIGSEGV and SIGSEGV"):
        done(pool_of(make=worker_jobs.make_surviving), "die", signal=signal.SIGSEGV)


def test_a_native_crash_is_one(pool_of: PoolOf) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        done(pool_of(), "crash natively")
    assert caught.value.crashed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_task_whose_processes_are_killed_is_not_at_fault(pool_of: PoolOf, number: signal.Signals) -> None:
    with pytest.raises(WorkerDiedError, match=f"ended with {number.name} and {number.name}") as caught:
        done(pool_of(), "die", signal=number)
    assert not caught.value.crashed


def test_a_process_that_exits_is_not_a_crash(pool_of: PoolOf) -> None:
    with pytest.raises(WorkerDiedError, match="ended with status 3 and status 3") as caught:
        done(pool_of(), "exit", status=3)
    assert not caught.value.crashed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_task_whose_process_dies_once_is_done_by_another(
    pool_of: PoolOf, number: signal.Signals, tmp_path: Path
) -> None:
    pool = pool_of()
    before = pid_of(pool)
    assert done(pool, "die", signal=number, files=[str(tmp_path / "died")]).fields["pid"] != before


def test_a_crash_and_a_kill_are_not_the_tasks_fault(pool_of: PoolOf, tmp_path: Path) -> None:
    pool = pool_of()
    future = begin(pool, "sleep", seconds=60, begun=str(tmp_path / "begun"))
    for number in (signal.SIGSEGV, signal.SIGKILL):
        eventually((tmp_path / "begun").exists)
        (tmp_path / "begun").unlink()
        (pid,) = pool.pids
        os.kill(pid, number)
    with pytest.raises(WorkerDiedError, match="SIGSEGV and SIGKILL") as caught:
        future.result(WAIT_S)
    assert not caught.value.crashed


def test_other_tasks_do_not_notice(pool_of: PoolOf) -> None:
    pool = pool_of(2)
    futures = []
    for index in range(60):
        futures.append(begin(pool, "echo", bytes([index]) * 1000))
        if index % 10 == 0:
            futures.append(begin(pool, "die", signal=signal.SIGSEGV))
    died = [future for future in futures if isinstance(future.exception(WAIT_S), WorkerDiedError)]
    answers = [future.result() for future in futures if future not in died]
    assert len(died) == 6
    assert [bytes(answer.frames[0]) for answer in answers] == [bytes([index]) * 1000 for index in range(60)]


def test_a_process_that_dies_idle_is_replaced_before_the_next_task(pool_of: PoolOf) -> None:
    pool = pool_of()
    before = pid_of(pool)
    os.kill(before, signal.SIGSEGV)
    eventually(lambda: bool(pool.pids - {before}))
    assert {pid_of(pool)} == pool.pids
    assert pool.num_deaths == 1


# Tasks that do not end


@pytest.mark.parametrize("do", ["sleep", "spin"])
def test_a_task_over_its_time_ends_its_process(pool_of: PoolOf, do: str, tmp_path: Path) -> None:
    pool = pool_of(timeout_s=0.5)
    before = pid_of(pool)
    with pytest.raises(WorkerTimeoutError, match=r"no answer within 0\.5 s"):
        done(pool, do, seconds=60, begun=str(tmp_path / "begun"))
    assert pid_of(pool) != before
    assert not is_alive(before)
    assert pool.num_deaths == 1


def test_an_answer_that_trickles_in_is_over_its_time_too(pool_of: PoolOf) -> None:
    with pytest.raises(WorkerTimeoutError):
        done(pool_of(timeout_s=0.5), "say", struct.pack("!I", 100) + b"{", hangs=True)


def test_a_stopped_process_is_replaced_and_its_task_done_by_another(pool_of: PoolOf, tmp_path: Path) -> None:
    pool = pool_of()
    before = pid_of(pool)
    future = begin(pool, "sleep", seconds=1.0, begun=str(tmp_path / "begun"))
    eventually((tmp_path / "begun").exists)
    os.kill(before, signal.SIGSTOP)
    assert future.result(WAIT_S / 2).fields["pid"] != before
    assert not is_alive(before)


def test_a_process_that_is_stopped_while_a_task_is_sent_is_replaced(pool_of: PoolOf) -> None:
    pool = pool_of()
    before = pid_of(pool)
    os.kill(before, signal.SIGSTOP)
    assert len(done(pool, "echo", bytes(8 * MIB)).frames[0]) == 8 * MIB
    assert not is_alive(before)


def test_an_idle_process_that_is_stopped_is_replaced(pool_of: PoolOf) -> None:
    pool = pool_of()
    before = pid_of(pool)
    os.kill(before, signal.SIGSTOP)
    eventually(lambda: bool(pool.pids - {before}))
    assert not is_alive(before)


def test_a_process_that_goes_on_soon_is_kept(pool_of: PoolOf) -> None:
    pool = pool_of()
    before = pid_of(pool)
    os.kill(before, signal.SIGSTOP)
    future = begin(pool, "echo")
    time.sleep(0.3)
    os.kill(before, signal.SIGCONT)
    assert future.result(WAIT_S).fields["pid"] == before


# Memory


def test_too_much_memory_is_an_error_of_the_task_alone(pool_of: PoolOf) -> None:
    pool = pool_of()
    before = pid_of(pool)
    assert done(pool, "allocate", mib=192).fields["mib"] == 192
    with pytest.raises(WorkError, match=r"^MemoryError$"):
        done(pool, "allocate", mib=320)
    assert pid_of(pool) == before


def test_a_process_that_keeps_memory_is_replaced(pool_of: PoolOf) -> None:
    """Else what one task leaves behind would be held against another."""
    pool = pool_of()
    before = pid_of(pool)
    assert done(pool, "allocate", mib=100, keep=True).fields["pid"] == before
    assert done(pool, "allocate", mib=100, keep=True).fields["pid"] == before
    assert done(pool, "allocate", mib=200).fields["pid"] != before
    assert pool.num_deaths == 0


# Processes that say what they like


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        struct.pack("!I", 2) + b"{}",
        struct.pack("!I", 10) + b"not JSON !",
        b"\x80\x05cos\nsystem\n" + bytes(100),
    ],
    ids=["a huge head", "no fields", "not JSON", "a pickle"],
)
def test_what_is_no_answer_is_not_believed(pool_of: PoolOf, said: bytes) -> None:
    pool = pool_of()
    before = pid_of(pool)
    with pytest.raises(WorkerDiedError, match=r"(SIGKILL|status 0) and (SIGKILL|status 0)") as caught:
        done(pool, "say", said)
    assert not caught.value.crashed
    assert pid_of(pool) != before


def test_an_answer_larger_than_allowed_is_refused(pool_of: PoolOf) -> None:
    pool = pool_of(memory_bytes=48 * MIB)
    with pytest.raises(WorkerDiedError):
        done(pool, "say", b"\0\0\0\x40" + b'{"fields":{},"frames":[50331649],"error":"","last":false}'.ljust(64))


def test_a_process_that_talks_unasked_is_replaced(pool_of: PoolOf) -> None:
    pool = pool_of()
    answer = b'{"fields":{"pid":1},"frames":[],"error":"","last":false}'
    spoken = done(pool, "say", struct.pack("!I", len(answer)) + answer)
    assert spoken.fields == {"pid": 1}  # its own answer follows, for the next task to find
    assert pid_of(pool) != 1


# Starting


def test_a_process_that_is_killed_while_it_starts_is_started_again(pool_of: PoolOf, tmp_path: Path) -> None:
    pool = pool_of(make=worker_jobs.make_noting_pid, args=(tmp_path,))
    future = begin(pool, "echo")
    eventually(lambda: len(list(tmp_path.iterdir())) == 1)
    (first,) = tmp_path.iterdir()
    os.kill(int(first.name), signal.SIGKILL)
    eventually(lambda: len(list(tmp_path.iterdir())) == 2)
    (tmp_path / "go").touch()
    assert str(future.result(WAIT_S).fields["pid"]) != first.name


def test_a_process_that_never_gets_ready_is_ended_and_started_again(pool_of: PoolOf, tmp_path: Path) -> None:
    pool = pool_of(make=worker_jobs.make_noting_pid, args=(tmp_path,), start_timeout_s=2.0)
    pool.start()
    eventually(lambda: len(list(tmp_path.iterdir())) >= 2)
    first = min(tmp_path.iterdir(), key=lambda one: one.stat().st_mtime_ns)
    eventually(lambda: not is_alive(int(first.name)))
    (tmp_path / "go").touch()
    assert str(pid_of(pool)) != first.name


def test_a_pool_of_which_no_process_starts_says_so_until_one_does(pool_of: PoolOf, tmp_path: Path) -> None:
    pool = pool_of(make=worker_jobs.make_if, args=(tmp_path / "allowed",), start_timeout_s=2.0)
    assert pool.down_reason() is None
    future = begin(pool, "echo")
    assert pool.down_reason() is None
    eventually(lambda: pool.down_reason() is not None)
    assert "the last one: it did not start" in str(pool.down_reason())
    (tmp_path / "allowed").touch()
    assert future.result(WAIT_S).fields["pid"]
    assert pool.down_reason() is None


def test_a_pool_whose_process_is_replaced_is_not_down(pool_of: PoolOf) -> None:
    pool = pool_of()
    os.kill(pid_of(pool), signal.SIGKILL)
    eventually(lambda: not pool.pids)
    assert pool.down_reason() is None


def test_a_task_in_hand_fails_if_its_process_cannot_be_replaced(pool_of: PoolOf, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.touch()
    pool = pool_of(make=worker_jobs.make_if, args=(allowed,))
    future = begin(pool, "sleep", seconds=60, begun=str(tmp_path / "begun"))
    eventually((tmp_path / "begun").exists)
    allowed.unlink()
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSEGV)
    with pytest.raises(WorkerDiedError) as caught:
        future.result(WAIT_S)
    assert not caught.value.crashed  # it was tried once only


# The fork server


def test_a_fork_server_that_dies_takes_its_processes_along_and_is_replaced(pool_of: PoolOf) -> None:
    pool = pool_of(2)
    pool.start()
    eventually(lambda: len(pool.pids) == 2)
    before = pool.pids
    os.kill(before.copy().pop(), signal.SIGSTOP)  # what is stopped must not be left behind
    os.kill(fork_server(), signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, before)))
    eventually(lambda: len(pool.pids - before) == 2)
    assert pid_of(pool) not in before


def test_a_fork_server_that_is_stopped_is_replaced(pool_of: PoolOf) -> None:
    pool = pool_of(start_timeout_s=5.0)
    before = pid_of(pool)
    stopped = fork_server()
    os.kill(stopped, signal.SIGSTOP)
    os.kill(before, signal.SIGKILL)
    eventually(lambda: bool(pool.pids - {before}))
    assert fork_server() != stopped
    assert pid_of(pool) != before


# Cancellation, and the end


def test_a_task_that_is_cancelled_before_it_has_begun_is_dropped(pool_of: PoolOf, tmp_path: Path) -> None:
    pool = pool_of()
    running = begin(pool, "sleep", seconds=0.5, begun=str(tmp_path / "first"))
    dropped = begin(pool, "sleep", bytes(MIB), seconds=0.0, begun=str(tmp_path / "second"))
    eventually((tmp_path / "first").exists)
    assert dropped.cancel()
    assert not pool._waiting, "it is kept in memory"
    assert not running.cancel()
    assert running.result(WAIT_S).fields["pid"]
    assert pid_of(pool)
    assert not (tmp_path / "second").exists()
    with pytest.raises(CancelledError):
        dropped.result()


@pytest.mark.parametrize("do", ["sleep", "spin"])
def test_closing_ends_processes_that_hang_and_fails_what_is_in_hand(pool_of: PoolOf, do: str, tmp_path: Path) -> None:
    pool = pool_of()
    before = pid_of(pool)
    futures = [begin(pool, do, seconds=60, begun=str(tmp_path / "begun")) for _ in range(3)]
    eventually(lambda: len(pool._waiting) == 2)
    pool.close()
    for future in futures:
        with pytest.raises(PoolClosedError):
            future.result(0)
    assert not is_alive(before)
    assert pool.num_deaths == 0
    with pytest.raises(PoolClosedError):
        begin(pool, "echo")
    assert pool.down_reason() is None


def test_closing_ends_a_stopped_process(pool_of: PoolOf) -> None:
    pool = pool_of()
    before = pid_of(pool)
    os.kill(before, signal.SIGSTOP)
    pool.close()
    assert not is_alive(before)


def test_closing_ends_processes_that_are_starting(pool_of: PoolOf, tmp_path: Path) -> None:
    pool = pool_of(make=worker_jobs.make_noting_pid, args=(tmp_path,))
    pool.start()
    eventually(lambda: bool(list(tmp_path.iterdir())))
    pool.close()
    assert not [one for one in tmp_path.iterdir() if is_alive(int(one.name))]
    assert not [thread for thread in threading.enumerate() if thread in pool._threads]


POOL_ALONE = """
import time
from producer.worker_pool import WorkerPool
from tests.unit import worker_jobs

pool = WorkerPool(1, worker_jobs.make, timeout_s=60, memory_bytes=1 << 28)
pool.start()
while not pool.pids:
    time.sleep(0.01)
print(*pool.pids, flush=True)
time.sleep(600)
"""


def test_a_killed_parent_leaves_no_process_not_even_a_stopped_one() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", POOL_ALONE], cwd=root, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
        eventually(lambda: not is_alive(pid))


def test_two_hundred_deaths_leave_no_file_and_no_thread(pool_of: PoolOf) -> None:
    pool = pool_of(2)

    def die(times: int) -> None:
        futures = [begin(pool, "die", signal=signal.SIGKILL) for _ in range(times)]
        assert all(isinstance(future.exception(WAIT_S * 4), WorkerDiedError) for future in futures)
        eventually(lambda: len(pool.pids) == 2)

    def held() -> tuple[int, int, int]:
        children = Path(f"/proc/{fork_server()}/task/{fork_server()}/children").read_text().split()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children)

    die(4)
    before = held()
    die(96)
    eventually(lambda: held() == before)
