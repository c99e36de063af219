"""The installed producer as the image runs it: no privileges, one writable folder, and its health asked by the step."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.image.conftest import step
from tests.image.environment import UID, can_confine, confine
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.photos import photos
from tests.kit.servers import ProducerServer

pytestmark = pytest.mark.skipif(not can_confine(), reason="this user may not make mount namespaces")

ELSEWHERE = ("/tmp", "/var/tmp", "/root", "/usr", "/etc", "/opt", "/run")


@dataclass(frozen=True, slots=True)
class Confined:
    server: ProducerServer
    cache: Path
    home: Path
    """The environment that it runs from."""

    @property
    def healthz(self) -> str:
        return self.server.metrics_url.replace("/metrics", "/healthz")

    def can_write(self, folder: str | Path) -> bool:
        """Whether its user, and even root inside its mounts, could leave a file in `folder`."""
        probe = f"{folder}/ec-image-probe"
        inside = ["nsenter", "--mount", "--target", str(self.server.pid)]
        done = subprocess.run([*inside, "sh", "-c", f"touch {probe} && rm {probe}"], capture_output=True)
        return done.returncode == 0


@pytest.fixture(scope="module")
def confined(python: Path, open_folder: Path) -> Iterator[Confined]:
    bin_dir, cache = confine(python.with_name("ec-producer"), open_folder)
    model = Path(shutil.copytree(cached_checkpoint("qwen2_5_vl"), open_folder / "model"))
    for file in model.iterdir():
        file.chmod(0o644)
    server = ProducerServer(
        model,
        transports=("nixl", "mooncake"),
        extra_args=("--preprocess-workers", "1"),
        name="image-producer",
        bin_dir=bin_dir,
        cwd=open_folder,
    )
    with server:
        yield Confined(server, cache, python.parents[1])


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_serves_without_a_privilege(confined: Confined) -> None:
    status = status_of(confined.server.pid)
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(UID)}
    assert status["Groups"] == ""
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapBnd")} == {0}
    assert status["NoNewPrivs"] == "1"
    assert confined.server.is_serving


def test_it_encodes_and_writes_to_its_one_folder_only(confined: Confined, tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(photos()["coffee.jpg"].data)
    command = [sys.executable, "-m", "producer.cli", "encode", str(photo), "--address", confined.server.address]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out").glob("*.safetensors"))
    assert confined.can_write(confined.cache)
    assert [place for place in (*ELSEWHERE, confined.home, Path.cwd()) if confined.can_write(place)] == []


def test_its_health_is_what_the_step_says(confined: Confined) -> None:
    done = step("healthcheck.py", confined.healthz)
    assert (done.returncode, done.stdout) == (0, "serving\n")


def test_a_frozen_one_and_a_stopped_one_are_not_healthy(confined: Confined) -> None:
    """The last test: it ends the producer."""
    os.kill(confined.server.pid, signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        assert step("healthcheck.py", confined.healthz).returncode == 1
        assert time.monotonic() - started_s < 60
    finally:
        os.kill(confined.server.pid, signal.SIGCONT)
    ending = confined.server.stop()
    assert ending
    assert ending.code == 0
    assert step("healthcheck.py", confined.healthz).returncode == 1
