"""Figures of a run on a GPU, as files that can be kept: what ran, on what, when, and what came out."""

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from platform import python_version
from typing import Any

import torch

FOLDER = "EC_PRODUCER_REPORT"
"""Environment variable that names the folder of reports; without it, none are written."""
COMMAND = "EC_PRODUCER_COMMAND"
"""Environment variable with the command that a report names; this process's own by default."""
_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = re.compile(r"torch|vllm(-cpu)?|triton|transformers|grpcio|nixl(-cu\d+)?|mooncake-transfer-engine.*", re.I)


def report(name: str, figures: Mapping[str, Any]) -> None:
    """Prints `figures` in a line, less their details (what is a mapping), and writes all of them to NAME.json.

    The file has the command, the hardware, the versions and the date as well.
    """
    line = {key: value for key, value in figures.items() if not isinstance(value, Mapping)}
    print(f"{name}: {json.dumps(line)}", flush=True)
    if folder := os.environ.get(FOLDER):
        record = {"command": _command(), "hardware": _hardware(), "versions": _versions(), "date": _now(), **figures}
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def reported(name: str) -> dict[str, Any]:
    """What the folder has of an earlier report; empty where there is none."""
    path = Path(os.environ.get(FOLDER) or os.devnull, f"{name}.json")
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _command() -> str:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return os.environ.get(COMMAND) or shlex.join([name, *sys.argv[1:]])


def _hardware() -> dict[str, Any]:
    """The device that CUDA calls the first, and the host's cores."""
    found: dict[str, Any] = {"device": "none", "devices": 0, "host_cores": len(os.sched_getaffinity(0))}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found |= {
            "device": device.name,
            "devices": torch.cuda.device_count(),
            "device_memory_bytes": device.total_memory,
        }
    return found


def _versions() -> dict[str, str]:
    """Of Python and what decides the figures, as far as it is installed."""
    found = {"python": python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if driver := re.search(r"\s(\d{3,}\.[\d.]+)\s", _DRIVER.read_text() if _DRIVER.is_file() else ""):
        found["driver"] = driver[1]
    packages = {one.metadata["Name"]: one.version for one in distributions()}
    return found | {name: version for name, version in packages.items() if name and _PACKAGES.fullmatch(name)}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
