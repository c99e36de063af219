"""One bounded run of a target in a process of its own, and the kept corpus."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.targets import TARGETS

CORPUS_DIR = Path(__file__).parent / "corpus"
FINDINGS_DIR = Path(__file__).parents[2] / ".cache" / "fuzz"
"""Inputs that were findings, ignored by git; the latest are kept."""
MAX_ENTRY_BYTES = 4096
MAX_ENTRIES = 60
_MAX_FINDINGS = 20
_START_S = 300
"""What a process may take beside its run: imports, inputs of the corpus, its end."""
_FORK = ("/bin/sh", "-c", '"$@" & wait $!', "sh")
"""Linux counts the peak of memory of the process that starts another as the other's, and libFuzzer goes by it: a
shell's is small, a test run's may be over the limit."""
_STARTED = re.compile(r"^#\d+\s+INITED cov: (\d+)", re.M)
_STATUS = re.compile(r"^#\d+\s+\w+\s+cov: (\d+)", re.M)
_DONE = re.compile(r"^Done (\d+) runs in", re.M)
_SAVED = re.compile(r"Test unit written to (\S*/(?:crash|timeout|oom)-\w+)")


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to. `finding` is the file of the input that ended it, None where nothing did."""

    name: str
    num_runs: int
    seed_coverage: int
    coverage: int
    new: tuple[bytes, ...]
    """Inputs that reached something that the corpus did not."""
    finding: Path | None
    output: str

    @property
    def is_ok(self) -> bool:
        return self.num_runs > 0 and self.finding is None


def kept(name: str) -> list[Path]:
    """The corpus of a target."""
    return sorted((CORPUS_DIR / name).glob("*"))


def fuzz(
    name: str,
    seconds: int,
    seeds: Iterable[bytes],
    *,
    module: str = "tests.fuzz.engine",
    wait_s: int = 0,
    most_runs: int = -1,
    start: int = 0,
) -> Report:
    """Runs a target for `seconds` from `seeds`; an input that is a finding ends it early and stays in FINDINGS_DIR.

    Args:
        name: the target.
        seconds: how long.
        seeds: inputs to begin with.
        module: the process, for the tests of this one.
        wait_s: seconds for one input, if not the target's.
        most_runs: runs that end it earlier; -1 for as many as there is time for.
        start: of libFuzzer's random numbers, so that a run can be had again; 0 for any.
    """
    limits = TARGETS[name]
    findings = FINDINGS_DIR / name
    findings.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds):
            Path(folder, f"{number:04}").write_bytes(seed)
        before = {path.read_bytes() for path in Path(folder).iterdir()}
        flags = [
            f"-max_total_time={seconds}",
            f"-runs={most_runs}",
            f"-seed={start}",
            f"-timeout={wait_s or limits.wait_s}",
            f"-rss_limit_mb={limits.memory_mb}",
            f"-max_len={limits.max_bytes}",
            f"-artifact_prefix={findings}/",
        ]
        output, status = _run([sys.executable, "-m", module, name, *flags, folder], seconds + _START_S)
        output += f"\nexit status {status}\n"
        new = {path.read_bytes() for path in Path(folder).iterdir()} - before
    saved = _SAVED.search(output)
    _drop_oldest(findings)
    done, started, covered = _DONE.search(output), _STARTED.search(output), _STATUS.findall(output)
    return Report(
        name=name,
        num_runs=int(done[1]) if done and not status else 0,
        seed_coverage=int(started[1]) if started else 0,
        coverage=int(covered[-1]) if covered else 0,
        new=tuple(sorted(new)),
        finding=Path(saved[1]) if saved else None,
        output=output,
    )


def keep(name: str, new: Iterable[bytes]) -> int:
    """Makes the kept corpus anew of what it has and of `new`: as few inputs as reach all; how many there are.

    Seeds and inputs of past findings stay, whatever they reach.
    """
    folder = CORPUS_DIR / name
    folder.mkdir(parents=True, exist_ok=True)
    fixed = {path.read_bytes(): path.name for path in kept(name) if not path.name.startswith("found-")}
    fixed |= {data: f"seed-{seed}" for seed, data in TARGETS[name].seeds().items()}
    with tempfile.TemporaryDirectory() as all_inputs, tempfile.TemporaryDirectory() as least:
        for number, data in enumerate([*fixed, *(path.read_bytes() for path in kept(name)), *new]):
            Path(all_inputs, f"{number:06}").write_bytes(data)
        flags = ["-set_cover_merge=1", f"-max_len={MAX_ENTRY_BYTES}", f"-timeout={TARGETS[name].wait_s}"]
        command = [sys.executable, "-m", "tests.fuzz.engine", name, *flags, least, all_inputs]
        output, status = _run(command, 10 * _START_S)
        if status:
            raise RuntimeError(f"the corpus of {name} cannot be minimised:\n{output[-2000:]}")
        found = sorted((path for path in Path(least).iterdir()), key=lambda path: path.stat().st_size)
        left = {path.read_bytes(): f"found-{path.name[:12]}" for path in found}
    shutil.rmtree(folder)
    folder.mkdir()
    for data, file in list({**fixed, **{data: file for data, file in left.items() if data not in fixed}}.items())[
        :MAX_ENTRIES
    ]:
        (folder / file).write_bytes(data)
    return len(kept(name))


def _run(command: list[str], timeout_s: float) -> tuple[str, int]:
    """What a process said, and its exit status."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*_FORK, *command], stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return said.read().decode(errors="replace"), status


def _drop_oldest(findings: Path) -> None:
    for path in sorted(findings.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MAX_FINDINGS]:
        path.unlink()
