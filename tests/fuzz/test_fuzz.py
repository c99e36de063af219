"""The kept corpus passes through every target, each target runs a little under libFuzzer, and finds what is planted."""

import importlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from producer.wire.pb import encoder_cache_pb2 as pb
from tests.fuzz import runner
from tests.fuzz.checks import Finding, check_said
from tests.fuzz.mutate import message
from tests.fuzz.runner import MAX_ENTRIES, MAX_ENTRY_BYTES, fuzz, kept
from tests.fuzz.targets import TARGETS

_RUNS = {"media": 40}
"""Of a short run; others make 1000. A file takes tens of milliseconds, the first one seconds."""
_BOUND_S = 120


# The corpus


def _entries() -> list[Any]:
    """Every kept input."""
    return [pytest.param(path, id=f"{name}-{path.name}") for name in TARGETS for path in kept(name)]


@pytest.mark.parametrize("path", _entries())
@pytest.mark.filterwarnings("default")  # libraries warn of odd files
def test_what_was_kept_is_no_finding(path: Path) -> None:
    target, _ = TARGETS[path.parent.name].load()
    target(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_small_and_has_every_seed(name: str) -> None:
    files = {path.name: path.read_bytes() for path in kept(name)}
    assert len(files) <= MAX_ENTRIES
    assert max(map(len, files.values())) <= MAX_ENTRY_BYTES
    assert {file for file in files if file.startswith("seed-")} == {f"seed-{seed}" for seed in TARGETS[name].seeds()}
    assert any(file.startswith("found-") for file in files)


def test_every_module_of_targets_is_one() -> None:
    folder = Path(importlib.import_module("tests.fuzz.targets").__file__ or "").parent
    assert {path.stem for path in folder.glob("[a-z]*.py")} == set(TARGETS)


# libFuzzer


@pytest.mark.parametrize("name", TARGETS)
def test_a_short_run_reaches_new_code_and_finds_nothing(name: str) -> None:
    """From one seed alone, so that there is something left to reach; the same each time, so that luck fails no gate."""
    seed = next(iter(TARGETS[name].seeds().values()))
    num_runs = _RUNS.get(name, 1000)
    report = fuzz(name, _BOUND_S, [seed], most_runs=num_runs, start=1)
    assert report.is_ok, report.output[-4000:]
    assert report.num_runs >= num_runs
    assert report.coverage > report.seed_coverage > 0
    assert report.new


@pytest.mark.parametrize(
    "kind", [pb.EncodeRequest, pb.AcquireRequest, pb.ReleaseRequest, pb.EncodeResponse], ids=lambda kind: kind.__name__
)
def test_every_field_of_a_message_is_changed(kind: type[Message]) -> None:
    """From an empty message on: what is set is set again, added to and cleared."""
    change, dice, data = message(kind, ["word"]), random.Random(1), b""
    seen = set()
    for _ in range(400):
        data = change(data, 4096, dice, lambda data, _: data)
        seen |= {field.name for field, _ in kind.FromString(data).ListFields()}
    assert seen >= {field.name for field in kind.DESCRIPTOR.fields}


_PLANTED = """
import tests.fuzz.targets.block as block

def read(data):
    if data[:1] == b"\\x07":
        {bug}

block.target = read
from tests.fuzz.engine import main

main()
"""


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("raise KeyError('planted')", "KeyError: 'planted'"),
        ("import time; time.sleep(60)", "libFuzzer: timeout"),
        ("while True: pass", "an input takes more than 5 s"),
        ("import time; kept = bytearray(b'x') * (1200 << 20); time.sleep(9)", "out-of-memory"),
        ("import os; os.kill(os.getpid(), 11)", "deadly signal"),
    ],
    ids=["error", "wait", "loop", "memory", "crash"],
)
def test_a_planted_bug_is_found(bug: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input that showed it is kept, and shows it."""
    (tmp_path / "planted.py").write_text(_PLANTED.format(bug=bug))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path.cwd()}")
    monkeypatch.setattr(runner, "FINDINGS_DIR", tmp_path / "findings")
    report = fuzz("block", 30, TARGETS["block"].seeds().values(), module="planted", wait_s=12)
    assert not report.is_ok
    assert said in report.output
    assert report.finding is not None
    assert report.finding.read_bytes()[0] == 7


def test_a_run_does_not_inherit_this_ones_peak_of_memory() -> None:
    ballast = bytearray(b"x") * (256 << 20)
    peak = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    said, status = runner._run([sys.executable, "-c", peak], 60)
    assert status == 0
    assert int(said) << 10 < len(ballast) // 2


def test_the_command_ends_with_the_finding_or_its_absence() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "block", "--seconds", "1"], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.startswith("block: ")
    assert run.stdout.endswith("FUZZ OK\n")
    run = subprocess.run([sys.executable, "-m", "tests.fuzz", "nonsense"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "no target nonsense; there are api, block" in run.stderr


# What targets check errors for


@pytest.mark.parametrize(
    "message", ["", "x" * 401, "<PIL object at 0x7f0011223344>", f"no {sys.prefix}/lib", "/proc/1/fd/3 is none"]
)
def test_an_error_that_says_nothing_too_much_or_where_we_are_is_a_finding(message: str) -> None:
    with pytest.raises(Finding):
        check_said(message)


def test_what_the_input_says_may_be_repeated() -> None:
    check_said("'/proc/1' is no size", b"/proc/1")
    check_said("a shape of 2x0x4294967295", b"")
