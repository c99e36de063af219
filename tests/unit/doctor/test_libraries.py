"""Checks of driver, device and packages, each in worlds in which it goes wrong."""

import socket
from collections.abc import Callable
from typing import Any

import pytest

from producer.doctor import libraries
from producer.doctor.probe import ProbeError
from tests.kit.ports import free_port
from tests.unit.doctor.conftest import Told, deployment, grade_of

Packages = Callable[[str, str], None]
H200 = {
    "version": "2.13.0",
    "cuda": "13.0",
    "device": "NVIDIA H200",
    "capability": "9.0",
    "free_bytes": 130 << 30,
    "total_bytes": 139 << 30,
}


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's build for GPUs is what is installed."""
    monkeypatch.setattr(libraries, "_version", lambda name: "0.33.0" if name == "vllm" else "")


# Driver and device


def test_the_cpu_build_needs_no_driver() -> None:
    findings = libraries.check_driver(deployment(prober=Told(driver={"missing": "libcuda.so.1: no such file"})))
    assert grade_of(findings) == "fine"


@pytest.mark.usefixtures("gpu_build")
@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"missing": "libcuda.so.1: cannot open"}, "there is no NVIDIA driver: libcuda.so.1"),
        ({"error": 100}, "error 100: no device is visible"),
        ({"error": 803}, "error 803: the driver and its library do not fit together"),
        ({"error": 4242}, "error 4242"),
        (ProbeError("it did not answer within 30 s"), "it did not answer within 30 s"),
    ],
)
def test_a_driver_that_is_missing_fails_or_hangs(told: Any, said: str) -> None:
    findings = libraries.check_driver(deployment(prober=Told(driver=told)))
    assert grade_of(findings) == "wrong"
    assert said in findings[0].what


@pytest.mark.usefixtures("gpu_build")
def test_a_driver_that_works() -> None:
    told = {"cuda": "13.0", "devices": ["NVIDIA H200", "NVIDIA H200"]}
    findings = libraries.check_driver(deployment(prober=Told(driver=told)))
    assert grade_of(findings) == "fine"
    assert "CUDA 13.0" in findings[0].what
    assert "NVIDIA H200" in findings[0].what


@pytest.mark.parametrize(
    ("settings", "changed", "grade"),
    [
        ({}, {}, "fine"),
        ({}, {"free_bytes": 1 << 30}, "warning"),
        ({"device_memory_bytes": 100 << 30}, {}, "fine"),
        ({"device_memory_bytes": 100 << 30}, {"free_bytes": 99 << 30}, "warning"),
        ({"device_memory_bytes": 140 << 30}, {}, "wrong"),
    ],
)
def test_device_memory(settings: dict[str, Any], changed: dict[str, Any], grade: str) -> None:
    findings = libraries.check_device(deployment(prober=Told(torch=H200 | changed), **settings))
    assert grade_of(findings) == grade
    assert "NVIDIA H200" in findings[0].what


def test_no_device_on_the_cpu_build() -> None:
    told = Told(torch={"version": "2.13.0+cpu", "cuda": ""})
    assert grade_of(libraries.check_device(deployment(prober=told))) == "fine"
    assert grade_of(libraries.check_device(deployment(prober=told, require_graphs=True))) == "wrong"


@pytest.mark.usefixtures("gpu_build")
def test_no_device_on_the_gpu_build() -> None:
    told = Told(torch={"version": "2.13.0", "cuda": "13.0"})
    assert grade_of(libraries.check_device(deployment(prober=told))) == "wrong"


def test_a_broken_pytorch_is_named(packages: Packages) -> None:
    packages("torch", "raise ImportError('libtorch.so: undefined symbol')")
    case = deployment()
    findings = libraries.check_torch(case)
    assert grade_of(findings) == "wrong"
    assert "libtorch.so: undefined symbol" in findings[0].what
    assert grade_of(libraries.check_device(case)) == "wrong"


# Packages


@pytest.mark.parametrize(
    ("version", "platform", "grade"),
    [
        ("0.32.0+cpu", "cpu", "fine"),
        ("0.33.1", "cuda", "fine"),
        ("0.31.2", "cuda", "wrong"),
        ("0.34.0", "cuda", "warning"),
        ("1.0.0", "cuda", "warning"),
        ("0.33.0", "xpu", "warning"),
    ],
)
def test_vllms_version_and_platform(packages: Packages, version: str, platform: str, grade: str) -> None:
    packages("vllm.__init__", f"__version__ = {version!r}")
    packages("vllm.platforms", f"class current_platform:\n    device_type = {platform!r}")
    findings = libraries.check_vllm(deployment())
    assert grade_of(findings) == grade
    assert version in findings[0].what


def test_a_vllm_that_does_not_import(packages: Packages) -> None:
    packages("vllm.__init__", "import os\nos.abort()")
    findings = libraries.check_vllm(deployment())
    assert grade_of(findings) == "wrong"
    assert "SIGABRT" in findings[0].what


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    findings = libraries.check_vllm(deployment())
    assert (grade_of(findings), findings[0].what) == ("wrong", "vLLM is not installed")


def test_what_serving_needs(packages: Packages) -> None:
    assert grade_of(libraries.check_packages(deployment())) == "fine"
    packages("blake3", "raise ImportError('GLIBC_2.99 not found')")
    findings = libraries.check_packages(deployment())
    assert grade_of(findings) == "wrong"
    assert "blake3 (ImportError: GLIBC_2.99 not found)" in findings[0].what


def test_tracing_that_is_off_needs_nothing(packages: Packages) -> None:
    packages("opentelemetry", "")
    assert grade_of(libraries.check_tracing(deployment())) == "fine"


def test_tracing_without_its_packages(packages: Packages) -> None:
    packages("opentelemetry", "")
    findings = libraries.check_tracing(deployment(otlp_traces_endpoint="127.0.0.1:4317"))
    assert grade_of(findings) == "wrong"


def test_tracing_without_a_collector() -> None:
    findings = libraries.check_tracing(deployment(otlp_traces_endpoint=f"127.0.0.1:{free_port()}"))
    assert grade_of(findings) == "warning"


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_tracing_with_a_collector(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        endpoint = f"{scheme}127.0.0.1:{collector.getsockname()[1]}"
        assert grade_of(libraries.check_tracing(deployment(otlp_traces_endpoint=endpoint))) == "fine"
