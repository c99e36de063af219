"""Questions in a process of their own: what hangs, crashes or prints there stays there."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from producer.doctor.probe import ProbeError, Prober
from producer.memory.region import SharedRegion

Packages = Callable[[str, str], None]


def test_an_answer_comes_though_the_process_prints(packages: Packages, capfd: pytest.CaptureFixture[str]) -> None:
    packages("talker", "import os\nprint('noise')\nos.write(2, b'noise' * 100_000)")
    assert Prober().ask("modules", ["talker", "nowhere_to_be_found"]) == {
        "nowhere_to_be_found": "ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    }
    assert capfd.readouterr() == ("", "")


def test_what_hangs_is_ended_with_its_children(packages: Packages, tmp_path: Path) -> None:
    source = f"""
import pathlib, subprocess, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
time.sleep(600)
"""
    packages("torch", source)
    begun_s = time.monotonic()
    with pytest.raises(ProbeError, match="it did not answer within 2 s"):
        Prober().ask("torch", timeout_s=2)
    assert time.monotonic() - begun_s < 60
    pid = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 30
    while _runs(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_crash_is_named(packages: Packages) -> None:
    packages("torch", "import os\nos.abort()")
    with pytest.raises(ProbeError, match="it crashed with SIGABRT"):
        Prober().ask("torch")


def test_an_exit_without_an_answer_says_what_was_printed_last(packages: Packages) -> None:
    packages("torch", "import os\nprint('no such device', flush=True)\nos._exit(3)")
    with pytest.raises(ProbeError, match="it ended without an answer: no such device"):
        Prober().ask("torch")


def test_an_error_is_its_first_line(packages: Packages) -> None:
    packages("torch", "raise RuntimeError('first\\nsecond')")
    with pytest.raises(ProbeError, match=r"^first$"):
        Prober().ask("torch")


def test_an_error_that_only_counts_says_what_it_counted(packages: Packages) -> None:
    """As vLLM's settings have it, behind one of ours."""
    source = """
try:
    raise ValueError("1 validation error for ModelConfig\\n  Value error, no such model [type=value_error]\\n More")
except ValueError as error:
    raise RuntimeError("model m: 1 validation error for ModelConfig") from error
"""
    packages("torch", source)
    with pytest.raises(ProbeError, match=r"^no such model$"):
        Prober().ask("torch")


def test_a_question_is_asked_once(packages: Packages, tmp_path: Path) -> None:
    packages("counted", f"open({str(tmp_path / 'count')!r}, 'a').write('x')")
    prober = Prober()
    for _ in range(3):
        prober.ask("modules", ["counted"])
    assert (tmp_path / "count").read_text() == "x"


def test_nothing_is_left_open(packages: Packages) -> None:
    before = set(os.listdir("/proc/self/fd"))
    packages("torch", "import os\nos.abort()")
    with pytest.raises(ProbeError):
        Prober().ask("torch")
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_driver_of_this_machine_is_told_or_missed() -> None:
    found = Prober().ask("driver")
    assert found.keys() in ({"missing"}, {"error"}, {"cuda", "devices"})


def test_a_region_is_reached_from_another_process() -> None:
    with SharedRegion.create("ec-producer-test", 1 << 12) as region:
        assert Prober().ask("region", os.getpid(), region.fd) is False
        region.view[:11] = b"ec-producer"
        assert Prober().ask("region", os.getpid(), region.fd) is True
    with pytest.raises(ProbeError, match="No such file"):
        Prober().ask("region", os.getpid(), 999_999)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
