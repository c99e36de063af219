"""The image's steps, run once for all tests: the wheel, and an environment like the image's with it installed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.image.dockerfile import ROOT
from tests.image.environment import IMAGE, make_base


def step(name: str, *arguments: str | Path, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script of `image/` as the Dockerfile does, with no index to ask."""
    command = [sys.executable] if name.endswith(".py") else []
    if "PYTHON" in environment and command:
        command = [str(environment["PYTHON"])]
    return run(*command, IMAGE / name, *arguments, **environment)


def run(*command: str | Path, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command without what would bring the source tree back."""
    kept: Mapping[str, str] = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    added = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        [str(word) for word in command],
        env={**kept, "PIP_NO_INDEX": "1", **added},
        cwd="/",
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="session")
def open_folder() -> Iterator[Path]:
    """Such as pytest's own are not: other users may enter it."""
    folder = Path(tempfile.mkdtemp(prefix="ec-image-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build's context has, as it is now."""
    folder = tmp_path_factory.mktemp("sources")
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            place = ROOT / line[1:]
            (shutil.copytree if place.is_dir() else shutil.copy)(place, folder / place.name)
    return folder


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = step("build-wheel.sh", sources, tmp_path_factory.mktemp("wheels"), PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def python(wheel: Path, open_folder: Path) -> Path:
    """The interpreter of an environment that has vLLM and, by the image's step, ec-producer with its extras."""
    python = make_base(open_folder / "image")
    done = step("install.py", wheel, "producer", "nixl", "mooncake", "tracing", PYTHON=python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ec-producer 0.1.0 is new" in done.stdout
    return python
