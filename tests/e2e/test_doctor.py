"""The real `ec-producer doctor`: on this machine as it is, and with a model, a port and a library that are broken."""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit.ports import free_port
from tests.kit.servers import BIN, ENVIRONMENT, HOST

pytestmark = pytest.mark.e2e

TIMEOUT_S = 300.0


def doctor(*arguments: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    command = [str(BIN / "ec-producer"), "doctor", *arguments, "--preprocess-workers", "1"]
    whole = os.environ | ENVIRONMENT | (env or {})
    return subprocess.run(command, env=whole, capture_output=True, text=True, timeout=TIMEOUT_S)


def free_addresses() -> list[str]:
    return ["--listen", f"{HOST}:{free_port()}", "--metrics-listen", f"{HOST}:{free_port()}"]


def test_a_machine_on_which_it_can_be_served(model: Path) -> None:
    transports = ["--transport", "nixl", "--nixl-devices", "lo", "--transport", "mooncake"]
    done = doctor(str(model), *free_addresses(), *transports, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    told: dict[str, Any] = json.loads(done.stdout)
    found = {one["check"]: one for one in told["findings"]}
    assert [one for one in found.values() if one["grade"] == "wrong"] == []
    for name in ("vllm", "torch", "packages", "nixl", "mooncake", "shared memory", "ports", "model"):
        assert found[name]["grade"] == "fine", found[name]
    assert found["model"]["what"] == "vLLM takes it, for image and video, in bfloat16"
    assert found["nixl"]["what"].startswith("opens, as ec-producer-")


def test_a_machine_on_which_it_cannot(model: Path, tmp_path: Path) -> None:
    """Each fault on a line of its own, and none of them hides another."""
    broken = tmp_path / "model"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).symlink_to(file)
    (broken / "config.json").unlink()
    (broken / "config.json").write_text('{"architectures": ["NobodyKnowsThisModel"], "model_type": "nobody"}')
    library = tmp_path / "packages" / "grpc_reflection.py"
    library.parent.mkdir()
    library.write_text("raise ImportError('GLIBC_2.99 not found')")
    with socket.create_server((HOST, 0)) as taken:
        address = f"{HOST}:{taken.getsockname()[1]}"
        env = {"PYTHONPATH": str(library.parent)}
        done = doctor(str(broken), "--listen", address, "--metrics-listen", f"{HOST}:0", env=env)
    assert (done.returncode, done.stderr) == (1, "")
    wrong = [line for line in done.stdout.splitlines() if line.startswith("✗ wrong")]
    assert [line.split()[2] for line in wrong] == ["packages", "ports", "model"]
    assert "GLIBC_2.99 not found" in wrong[0]
    assert address in wrong[1]
    assert "nobody" in wrong[2]
    assert "\033" not in done.stdout
