"""Checks of ports, transports and RDMA devices."""

import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from producer.config import ServeConfig
from producer.doctor import network
from producer.http_server import HttpServer
from producer.metrics import Metrics
from producer.recent_errors import RecentErrors
from producer.status import Status
from producer.status_page import StatusPage
from tests.kit.ports import free_port
from tests.unit.doctor.conftest import deployment, grade_of

Packages = Callable[[str, str], None]
FREE = "127.0.0.1:0"


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


# Ports


def test_free_ports() -> None:
    case = deployment(listen=f"127.0.0.1:{free_port()}", metrics_listen=f"127.0.0.1:{free_port()}")
    assert grade_of(network.check_ports(case)) == "fine"
    assert grade_of(network.check_ports(deployment(listen="[::1]:0", metrics_listen="0.0.0.0:0"))) == "fine"
    assert grade_of(network.check_ports(deployment(listen=FREE, metrics_listen=FREE))) == "fine"


@pytest.mark.parametrize("flag", ["listen", "metrics_listen"])
def test_a_taken_port(taken: str, flag: str) -> None:
    settings = {"listen": FREE, "metrics_listen": FREE, flag: taken}
    findings = network.check_ports(deployment(**settings))
    assert grade_of(findings) == "wrong"
    assert findings[0].what == f"--{flag.replace('_', '-')} {taken}: Address already in use"


def test_two_taken_ports_are_both_said(taken: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        findings = network.check_ports(deployment(listen=taken, metrics_listen=address))
    assert [finding.grade.value for finding in findings] == ["wrong", "wrong"]


def test_an_address_of_another_machine() -> None:
    findings = network.check_ports(deployment(listen="192.0.2.1:50051", metrics_listen=FREE))
    assert grade_of(findings) == "wrong"
    assert "Cannot assign requested address" in findings[0].what


def test_one_port_for_both() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert grade_of(network.check_ports(deployment(listen=address, metrics_listen=address))) == "wrong"


def test_a_producer_that_runs_here_is_no_fault(taken: str) -> None:
    """Somebody asks inside of the producer's own container."""
    metrics = Metrics()
    page = StatusPage(Status(ServeConfig(model="m"), metrics.registry, RecentErrors()), metrics.registry)
    server = HttpServer("127.0.0.1", 0, page)
    server.start()
    try:
        findings = network.check_ports(deployment(listen=taken, metrics_listen=f"127.0.0.1:{server.port}"))
    finally:
        server.close()
    assert grade_of(findings) == "warning"
    assert "a producer runs here" in findings[0].what


# Transports


@pytest.mark.parametrize("check", [network.check_nixl, network.check_mooncake])
def test_a_transport_that_nobody_asked_for(check: Callable[..., list[object]], monkeypatch: pytest.MonkeyPatch) -> None:
    for found, said in ((None, "not installed"), (object(), "installed")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        (finding,) = check(deployment())
        assert (finding.grade, finding.what.split(",")[0]) == ("fine", said)


def test_nixl_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    findings = network.check_nixl(deployment(transport=("nixl",), nixl_devices="lo"))
    assert grade_of(findings) == "fine", findings


def test_mooncake_opens() -> None:
    findings = network.check_mooncake(deployment(transport=("mooncake",), mooncake_host="127.0.0.1"))
    assert grade_of(findings) == "fine", findings


def test_a_nixl_that_does_not_load(packages: Packages) -> None:
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        packages(f"{name}.__init__", "")
        packages(f"{name}._api", "raise ImportError('libucp.so.0: cannot open shared object file')")
    findings = network.check_nixl(deployment(transport=("nixl",)))
    assert grade_of(findings) == "wrong"
    assert "libucp.so.0: cannot open shared object file" in findings[0].what


def test_a_mooncake_without_its_libraries(packages: Packages) -> None:
    packages("mooncake.__init__", "")
    packages("mooncake.engine", "raise ImportError('libibverbs.so.1: cannot open shared object file')")
    findings = network.check_mooncake(deployment(transport=("mooncake",), mooncake_host="127.0.0.1"))
    assert grade_of(findings) == "wrong"
    assert "libibverbs.so.1" in findings[0].what
    assert "apt-get install" in findings[0].do


# RDMA


class Rdma:
    """A machine's devices, as the kernel shows them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kernel, self._devices = folder / "class", folder / "dev"
        self._devices.mkdir()
        monkeypatch.setattr(network, "_RDMA_CLASS", self._kernel)
        monkeypatch.setattr(network, "_RDMA_DEVICES", self._devices)
        monkeypatch.setattr(network, "_may_lock", lambda: False)

    def add(self, name: str, state: str) -> None:
        port = self._kernel / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)

    def pass_in(self) -> None:
        (self._devices / "uverbs0").touch()


@pytest.fixture
def rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rdma:
    return Rdma(tmp_path, monkeypatch)


WANTED = {"transport": ("mooncake",), "mooncake_protocol": "rdma", "mooncake_host": "127.0.0.1"}
ALSO_WANTED = {"transport": ("nixl",), "nixl_devices": "mlx5_0:1"}
NOT_WANTED = {"transport": ("nixl",), "nixl_devices": "eth0"}


def grade(settings: dict[str, object]) -> str:
    return grade_of(network.check_rdma(deployment(**settings)))


def test_no_device(rdma: Rdma) -> None:
    assert [grade(one) for one in (WANTED, ALSO_WANTED, NOT_WANTED, {})] == ["wrong", "wrong", "fine", "fine"]


def test_a_device_that_is_not_passed_in(rdma: Rdma) -> None:
    rdma.add("mlx5_0", "4: ACTIVE\n")
    assert [grade(one) for one in (WANTED, ALSO_WANTED, {})] == ["wrong", "wrong", "fine"]


def test_a_port_that_is_down(rdma: Rdma, limits: dict[int, int]) -> None:
    rdma.add("mlx5_0", "1: DOWN\n")
    rdma.pass_in()
    assert [grade(one) for one in (WANTED, {})] == ["wrong", "warning"]
    rdma.add("mlx5_1", "4: ACTIVE\n")
    assert grade(WANTED) == "fine"


def test_too_little_memory_may_be_locked(rdma: Rdma, limits: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    rdma.add("mlx5_0", "4: ACTIVE\n")
    rdma.pass_in()
    limits[resource.RLIMIT_MEMLOCK] = 8 << 20
    assert [grade(one) for one in (WANTED, {})] == ["wrong", "warning"]
    monkeypatch.setattr(network, "_may_lock", lambda: True)
    assert grade(WANTED) == "fine"
    monkeypatch.setattr(network, "_may_lock", lambda: False)
    assert grade({**WANTED, "pool_bytes": 8 << 20}) == "fine"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Limits of this process that are not the kernel's: none, unless a test says so."""
    found: dict[int, int] = {}
    monkeypatch.setattr("resource.getrlimit", lambda kind: (found.get(kind, resource.RLIM_INFINITY),) * 2)
    return found
