"""Checks of what the kernel gives, against kernels of a test's own making and, where that is possible, the real one."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from producer.doctor import host
from producer.doctor.probe import ProbeError
from tests.unit.doctor.conftest import Told, deployment, grade_of

GIB = 1 << 30


class Kernel:
    """A machine of 64 GiB whose cgroups and memory a test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cgroup = folder / "cgroup"
        self._own = folder / "own"
        self._meminfo = folder / "meminfo"
        for name, path in (("_CGROUP", self._cgroup), ("_OWN_CGROUP", self._own), ("_MEMINFO", self._meminfo)):
            monkeypatch.setattr(host, name, path)
        self.belong("0::/")
        self.tell("MemTotal: 67108864 kB\nHugePages_Total: 0\n")

    def belong(self, lines: str) -> None:
        self._own.write_text(lines)

    def tell(self, meminfo: str) -> None:
        self._meminfo.write_text(meminfo)

    def limit(self, file: str, value: str) -> None:
        path = self._cgroup / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path, monkeypatch)


# Shared memory


def test_shared_memory_of_this_machine() -> None:
    assert grade_of(host.check_shared_memory(deployment())) == "fine"


def test_shared_memory_that_others_do_not_reach() -> None:
    for answer in (ProbeError("Permission denied"), False):
        assert grade_of(host.check_shared_memory(deployment(prober=Told(region=answer)))) == "warning"


def test_no_anonymous_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    findings = host.check_shared_memory(deployment())
    assert grade_of(findings) == "wrong"
    assert "Operation not permitted" in findings[0].what


@pytest.mark.parametrize(("free", "grade"), [(GIB, "fine"), (32 << 20, "warning")])
def test_the_size_of_dev_shm(monkeypatch: pytest.MonkeyPatch, free: int, grade: str) -> None:
    found = SimpleNamespace(f_frsize=4096, f_blocks=GIB // 4096, f_bavail=free // 4096)
    monkeypatch.setattr("os.statvfs", lambda path: found)
    assert grade_of(host.check_dev_shm(deployment())) == grade


def test_no_dev_shm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_SHM", tmp_path / "nowhere")
    assert grade_of(host.check_dev_shm(deployment())) == "warning"


def test_hugepages(kernel: Kernel) -> None:
    assert "none reserved" in host.check_hugepages(deployment())[0].what
    kernel.tell("HugePages_Total: 8\nHugePages_Free: 3\nHugepagesize: 2048 kB\n")
    assert "3 of 8 pages of 2.0 MiB are free" in host.check_hugepages(deployment())[0].what


# Memory


def test_memory_that_is_enough(kernel: Kernel) -> None:
    findings = host.check_memory(deployment(preprocess_workers=4))
    assert grade_of(findings) == "fine"
    assert "this host's memory is 64.0 GiB" in findings[0].what


def test_a_pool_larger_than_the_host(kernel: Kernel) -> None:
    assert grade_of(host.check_memory(deployment(pool_bytes=65 * GIB))) == "wrong"


def test_a_pool_larger_than_the_containers_limit(kernel: Kernel) -> None:
    kernel.limit("memory.max", str(8 * GIB))
    findings = host.check_memory(deployment(pool_bytes=9 * GIB))
    assert grade_of(findings) == "wrong"
    assert "the cgroup's memory is 8.0 GiB" in findings[0].what


def test_a_limit_of_a_cgroup_above(kernel: Kernel) -> None:
    kernel.belong("0::/kubepods/pod1/container")
    kernel.limit("kubepods/pod1/container/memory.max", "max")
    kernel.limit("kubepods/pod1/memory.max", str(8 * GIB))
    kernel.limit("kubepods/memory.max", str(32 * GIB))
    assert grade_of(host.check_memory(deployment(pool_bytes=9 * GIB))) == "wrong"


def test_a_limit_of_cgroups_in_version_1(kernel: Kernel) -> None:
    kernel.belong("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n3:pids:/docker/abc\n")
    kernel.limit("memory/docker/abc/memory.limit_in_bytes", str(8 * GIB))
    assert grade_of(host.check_memory(deployment(pool_bytes=9 * GIB))) == "wrong"


def test_preprocessing_that_could_take_more_than_there_is(kernel: Kernel) -> None:
    settings = {"preprocess_workers": 8, "preprocess_memory_bytes": 8 * GIB}
    assert grade_of(host.check_memory(deployment(**settings))) == "warning"
    assert grade_of(host.check_memory(deployment(**{**settings, "preprocess_memory_bytes": GIB}))) == "fine"


# Processors and limits


def test_more_workers_than_processors(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert grade_of(host.check_processors(deployment(preprocess_workers=8))) == "fine"
    findings = host.check_processors(deployment(preprocess_workers=9))
    assert grade_of(findings) == "warning"
    assert findings[0].do.startswith("--preprocess-workers 8:")


def test_processors_that_a_quota_takes_away(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    kernel.limit("cpu.max", "250000 100000")
    assert grade_of(host.check_processors(deployment(preprocess_workers=2))) == "fine"
    assert grade_of(host.check_processors(deployment(preprocess_workers=3))) == "warning"
    kernel.limit("cpu.max", "max 100000")
    assert grade_of(host.check_processors(deployment(preprocess_workers=3))) == "fine"


def test_few_threads_and_processes(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grade_of(host.check_tasks(deployment())) == "fine"
    kernel.limit("pids.max", "100")
    assert grade_of(host.check_tasks(deployment())) == "warning"
    kernel.limit("pids.max", "max")
    monkeypatch.setattr("resource.getrlimit", lambda kind: (100, 100))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert grade_of(host.check_tasks(deployment())) == "warning"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert grade_of(host.check_tasks(deployment())) == "fine"


def test_few_open_files_in_a_process_that_has_few() -> None:
    """The real limit, of a real process."""
    code = """
import resource
from producer.doctor.host import check_files
from tests.unit.doctor.conftest import deployment
for most in (4096, 100):
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, 4096))
    print(check_files(deployment())[0].grade.value)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fine", "warning"]


def test_limits_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert grade_of(host.check_files(deployment())) == "fine"
    assert "any amount may be locked" in host.check_locked_memory(deployment())[0].what


def test_locked_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (8 << 20, 8 << 20))
    assert "8.0 MiB may be locked" in host.check_locked_memory(deployment())[0].what


def test_the_real_kernel_is_read() -> None:
    """Files are where they are looked for: what they say is this machine's own affair."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < host._memory_limit()[0] <= total
    assert 0 < host._processors() <= (os.cpu_count() or 1)
