"""Services: readiness, clear failures, and that nothing of them outlives whoever started them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.leftovers import Snapshot, leftovers, our_processes, snapshot
from tests.kit.ports import free_port
from tests.kit.processes import Service, ServiceError
from tests.kit.stack import Stack

BOUND_S = 30.0

# Starts a child in the same group and a daemon in a session of its own, then waits for a signal.
FAMILY = """
    import os, signal, subprocess, sys, time
    sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    time.sleep(0.5)
    print("ready", flush=True)
    signal.pause()
"""  # noqa: E501


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Service]:
    """A service that runs Python code, and is ready as soon as its log says so."""

    def service(code: str, name: str = "service", **settings: object) -> Service:
        log = tmp_path / f"{name}.log"
        return Service(name, python(code), ready=lambda: "ready" in log.read_text(), logs=tmp_path, **settings)  # type: ignore[arg-type]

    return service


@pytest.fixture(autouse=True)
def before() -> Snapshot:
    return snapshot()


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_ends_with_the_code_of_its_command(make: Callable[..., Service]) -> None:
    service = make(
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('ready', flush=True); signal.pause()"
    )
    with service:
        assert service.running
    service.start()
    service.wait_ready()
    ending = service.stop()
    assert ending is not None
    assert (ending.code, ending.killed) == (7, ())
    assert service.stop() is None


def test_a_signal_shows_in_the_code(make: Callable[..., Service]) -> None:
    service = make("import signal; print('ready', flush=True); signal.pause()")
    service.start()
    service.wait_ready()
    service.kill()
    assert eventually(lambda: not service.running)
    ending = service.stop()
    assert ending is not None
    assert ending.code == 128 + signal.SIGKILL


def test_children_and_daemons_end_too(make: Callable[..., Service], before: Snapshot) -> None:
    service = make(FAMILY, grace_s=0.5)
    service.start()
    service.wait_ready()
    assert len(our_processes()) == 4  # the supervisor, the command, its child, its daemon
    ending = service.stop()
    assert ending is not None
    assert len(ending.killed) == 2
    assert leftovers(before) == []


def test_a_command_deaf_to_sigterm_is_killed(make: Callable[..., Service], before: Snapshot) -> None:
    service = make(
        "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True)\nwhile True: signal.pause()",
        grace_s=0.2,
    )
    service.start()
    service.wait_ready()
    ending = service.stop()
    assert ending is not None
    assert ending.code == 128 + signal.SIGKILL
    assert len(ending.killed) == 1
    assert leftovers(before) == []


def test_its_temporary_folder_goes_with_it(make: Callable[..., Service]) -> None:
    service = make(
        "import signal, tempfile; print(tempfile.mkdtemp(), flush=True); print('ready', flush=True); signal.pause()"
    )
    with service:
        folder = Path(service.log.read_text().splitlines()[0])
        assert folder.is_dir()
    assert not folder.exists()
    assert not folder.parent.exists()


def test_one_that_dies_early_shows_the_end_of_its_log(make: Callable[..., Service], before: Snapshot) -> None:
    service = make("print('line one', flush=True); raise SystemExit('the model is missing')")
    with pytest.raises(ServiceError, match=r"service ended before it was ready(.|\n)*line one\n.*the model is missing"):
        service.__enter__()
    assert leftovers(before) == []


def test_one_that_cannot_run_says_why(tmp_path: Path) -> None:
    service = Service("absent", ["/nowhere/absent"], ready=lambda: False, logs=tmp_path)
    with pytest.raises(ServiceError, match=r"cannot run /nowhere/absent: .*No such file"):
        service.__enter__()


def test_one_that_never_is_ready_is_given_up(make: Callable[..., Service], before: Snapshot) -> None:
    service = make("import signal; print('busy', flush=True); signal.pause()", start_timeout_s=1.0)
    with pytest.raises(ServiceError, match=r"service was not ready after \d+ s(.|\n)*busy"):
        service.__enter__()
    assert leftovers(before) == []


def test_a_stack_ends_all_and_tells_how(make: Callable[..., Service], before: Snapshot) -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('ready', flush=True); signal.pause()"
    with Stack() as stack:
        for name in ("one", "two"):
            service = make(code, name)
            stack.start(service)
            service.wait_ready()
        endings = stack.stop_all()
        assert {name: ending.code for name, ending in endings.items()} == {"one": 0, "two": 0}
    assert leftovers(before) == []


def test_a_stack_restores_the_signal_handlers() -> None:
    handlers = [signal.getsignal(number) for number in Stack.SIGNALS]
    with Stack():
        assert signal.getsignal(signal.SIGTERM) not in handlers
    assert [signal.getsignal(number) for number in Stack.SIGNALS] == handlers


# A program with a service whose children resist; it prints their mark and waits.
OWNER = f"""
    import signal, sys, time
    from pathlib import Path
    from tests.kit.processes import MARK_VALUE, Service
    from tests.kit.stack import Stack
    log = Path(sys.argv[1]) / "family.log"
    with Stack() as stack:
        ready = lambda: "ready" in log.read_text()
        service = Service("family", {python(FAMILY)!r}, ready=ready, logs=log.parent, grace_s=0.2)
        stack.start(service)
        service.wait_ready()
        print(MARK_VALUE, flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_its_owner(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([*python(OWNER), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as owner:
        assert owner.stdout is not None
        monkeypatch.setattr("tests.kit.leftovers.MARK_VALUE", owner.stdout.readline().decode().strip())
        assert len(our_processes()) == 4
        owner.send_signal(number)
        owner.wait(BOUND_S)
    assert eventually(lambda: not our_processes())


def test_free_ports_differ() -> None:
    ports = {free_port() for _ in range(50)}
    assert len(ports) == 50


def test_leftovers_name_each_thing(make: Callable[..., Service], before: Snapshot) -> None:
    port = free_port()
    entry = Path("/dev/shm") / f"ec-kit-test-{os.getpid()}"
    code = f"""
        import signal, socket
        listener = socket.create_server(("127.0.0.1", {port}))
        open({str(entry)!r}, "w").close()
        print("ready", flush=True)
        signal.pause()
    """
    try:
        with make(code):
            found = "\n".join(leftovers(before))
            assert f"shared memory {entry}" in found
            assert f"port {port} is still listening" in found
            assert "process " in found
        assert leftovers(before) == [f"shared memory {entry}"]
    finally:
        entry.unlink(missing_ok=True)


def test_what_the_tracker_of_others_will_unlink_is_not_ours(before: Snapshot) -> None:
    entry = Path("/dev/shm") / f"sem.mp-test{os.getpid()}"
    tracker = [sys.executable, "-c", "import sys; sys.stdin.read()  # multiprocessing.resource_tracker"]
    try:
        entry.touch()
        with subprocess.Popen(tracker, stdin=subprocess.PIPE):
            assert leftovers(before) == []
    finally:
        entry.unlink(missing_ok=True)


def test_shared_memory_in_use_by_others_is_not_ours(before: Snapshot, tmp_path: Path) -> None:
    entry = Path("/dev/shm") / f"ec-kit-other-{os.getpid()}"
    try:
        with entry.open("w"):
            assert leftovers(before) == []
        assert leftovers(before) == [f"shared memory {entry}"]
    finally:
        entry.unlink(missing_ok=True)
