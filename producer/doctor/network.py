"""Checks of what the network has to give: ports, and the devices and libraries of the transports."""

import http.client
import importlib.util
import os
import resource
import socket
from pathlib import Path

from producer.config import ServeConfig, split_address
from producer.doctor.finding import Deployment, Finding, fine, size, warning, wrong
from producer.doctor.probe import ProbeError

_CONNECT_S = 3.0
_TRANSPORT_S = 60.0
_LIBRARIES = {"nixl": ("nixl_cu13", "nixl_cu12", "nixl"), "mooncake": ("mooncake",)}
_RDMA_CLASS = Path("/sys/class/infiniband")
_RDMA_DEVICES = Path("/dev/infiniband")


def check_ports(deployment: Deployment) -> list[Finding]:
    config = deployment.config
    addresses = {"--listen": config.listen, "--metrics-listen": config.metrics_listen}
    if config.listen == config.metrics_listen and not config.listen.endswith(":0"):
        return wrong(f"--listen and --metrics-listen are both {config.listen}", "give each a port of its own")
    faults = {flag: why for flag, address in addresses.items() if (why := _why_not(address))}
    if faults and _is_producer(config.metrics_listen):
        return warning(f"a producer runs here, at {' and '.join(addresses.values())}", "another one needs other ports")
    findings: list[Finding] = []
    for flag, why in faults.items():
        do = f"give {flag} an address of this machine and a free port, or end who listens there"
        findings += wrong(f"{flag} {addresses[flag]}: {why}", do)
    return findings or fine(f"{config.listen} (gRPC) and {config.metrics_listen} (metrics) can be had")


def check_nixl(deployment: Deployment) -> list[Finding]:
    return _check_library(deployment, "nixl", "pip install 'ec-producer[nixl]'")


def check_mooncake(deployment: Deployment) -> list[Finding]:
    do = "pip install 'ec-producer[mooncake]', and apt-get install libcurl4 libibverbs1 libnuma1"
    return _check_library(deployment, "mooncake", do)


def _check_library(deployment: Deployment, name: str, do: str) -> list[Finding]:
    """A transport that was asked for is opened as `serve` does; another one is only looked for."""
    config = deployment.config
    if name not in config.transport:
        found = any(importlib.util.find_spec(module) for module in _LIBRARIES[name])
        return fine(f"{'installed' if found else 'not installed'}, and not asked for with --transport {name}")
    try:
        peer = deployment.prober.ask("transport", name, config.transport_options[name], timeout_s=_TRANSPORT_S)
    except ProbeError as error:
        return wrong(f"--transport {name} does not open: {error}", f"{do}; or leave it out, gRPC is always there")
    return fine(f"opens, as {peer}")


def check_rdma(deployment: Deployment) -> list[Finding]:
    """Devices that the kernel has, what of them is passed in here, and whether memory may be registered."""
    config = deployment.config
    wanted = _wants_rdma(config)
    ports = {port.parent.parent.name: _state(port) for port in sorted(_RDMA_CLASS.glob("*/ports/*"))}
    if not ports:
        if wanted:
            return wrong(
                f"{wanted}, and this machine has no RDMA device", "use TCP, or give the pod the device's resource"
            )
        return fine("no RDMA device; transports use shared memory and TCP")
    names = ", ".join(f"{name} {state}" for name, state in ports.items())
    if not any(_RDMA_DEVICES.glob("uverbs*")):
        if wanted:
            do = "give the container /dev/infiniband: the RDMA resource of the cluster's device plugin"
            return wrong(f"{wanted}; the host has {names}, and {_RDMA_DEVICES} is not passed in here", do)
        return fine(f"the host has {names}, not passed in here and not asked for")
    grade = wrong if wanted else warning
    if "ACTIVE" not in ports.values():
        return grade(f"no port is active: {names}", "see the cable, the switch and the subnet manager with ibstat")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if memlock not in (resource.RLIM_INFINITY, -1) and memlock < config.pool_bytes and not _may_lock():
        what = f"{names}; memory that may be locked is {size(memlock)}, and the pool has {size(config.pool_bytes)}"
        return grade(what, "ulimit -l unlimited, LimitMEMLOCK=infinity, or the capability IPC_LOCK")
    return fine(f"{names}, and memory can be registered")


def can_connect(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            return True
    except OSError:
        return False


def _wants_rdma(config: ServeConfig) -> str:
    if "mooncake" in config.transport and config.mooncake_protocol == "rdma":
        return "--mooncake-protocol is rdma"
    if "nixl" in config.transport and ":" in config.nixl_devices:  # "mlx5_0:1"; network interfaces have no port
        return f"--nixl-devices is {config.nixl_devices}"
    return ""


def _state(port: Path) -> str:
    try:
        return (port / "state").read_text().partition(":")[2].strip() or "unknown"
    except OSError:
        return "unknown"


def _may_lock() -> bool:
    """Whether this process has IPC_LOCK, for which the limit does not count."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(effective >> 14 & 1)


def _is_producer(metrics_listen: str) -> bool:
    """Whether it is a producer's status page that listens there."""
    host, port = split_address("metrics_listen", metrics_listen)
    connection = http.client.HTTPConnection(
        {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, timeout=_CONNECT_S
    )
    try:
        connection.request("HEAD", "/healthz")
        return connection.getresponse().getheader("Server") == "ec-producer"
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _why_not(address: str) -> str:
    """Why nothing can listen there; "" where it can."""
    host, port = split_address("address", address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was closed lately is no obstacle
            probe.bind((host, port))
    except OSError as error:
        return os.strerror(error.errno) if isinstance(error.errno, int) and error.errno > 0 else str(error)
    return ""
