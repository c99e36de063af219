"""A rendered container on this machine: its own command line and environment, on loopback and without a GPU.

What Kubernetes does is done here: arguments are expanded, volumes are folders, secrets are files. What this machine
lacks is replaced, as little as can be, and told in `Container.changes`.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc

from tests.chart.rendering import Manifest, container, expand, flags, pod
from tests.chart.sockets import listening
from tests.kit.certificates import Authority
from tests.kit.ports import free_port
from tests.kit.processes import LOGS_DIR, Service
from tests.kit.servers import BIN, ENVIRONMENT, HEALTH_METHOD, HEALTH_SERVING, HOST

FACTS = {"status.podIP": HOST, "metadata.name": "demo-ec-producer-0"}
"""What the downward API says of the pod."""
TOKEN = "a-token-of-the-tests"
TOKENS = f"first:{TOKEN}\n"
_REPLACED = {
    "--require-graphs": "",  # there is no GPU
    "--mooncake-protocol": "tcp",  # nor an RDMA device
    "--nixl-devices": "lo",
    "--pool-bytes": "256MiB",  # nor much memory,
    "--preprocess-workers": "1",  # nor many cores
    "--revision": "",  # the checkpoint is a folder,
    "--mm-processor-kwargs": "",  # and its processor has no settings
}
"""What this machine lacks, by flag: the value here, or "" for none."""
_PROBE_S = 5.0
_POLL_S = 0.05
_VLLM_CACHE = Path.home() / ".cache" / "vllm"
"""What vLLM knows of its models, which it would find out anew in an empty home folder, for half a minute."""


@dataclass(slots=True)
class Container:
    """The producer's container of some manifests, as a process."""

    words: list[str]
    environment: dict[str, str]
    manifest: Manifest
    """As rendered."""
    grace_s: int
    """The pod's, from the preStop hook to SIGKILL."""
    pre_stop_s: int
    ports: dict[int, int]
    """Where the container's ports are here."""
    folder: Path
    """Holds its volumes."""
    changes: list[str] = field(default_factory=list)
    """Flags that are others than those rendered, each with why."""

    def service(self, name: str) -> Service:
        """The process, not started yet. It is ready when its startup probe succeeds; it is given the pod's grace."""
        return Service(
            name,
            [str(BIN / self.words[0]), *self.words[1:]],
            ready=lambda: not self.probe("startupProbe"),
            env=ENVIRONMENT | {"VLLM_CACHE_ROOT": str(_VLLM_CACHE)} | self.environment,
            cwd=self.folder,
            logs=LOGS_DIR,
            grace_s=self.grace_s - self.pre_stop_s,
        )

    def probe(self, kind: str) -> str:
        """Asks as the kubelet would: no TLS, no client certificate, no token. "" for success, else why not."""
        probe = self.manifest[kind]
        if "grpc" in probe:
            return ask_grpc(self.ports[probe["grpc"]["port"]], probe["grpc"]["service"])
        names = {port["name"]: port["containerPort"] for port in self.manifest["ports"]}
        return _ask_http(self.ports[names[probe["httpGet"]["port"]]], probe["httpGet"]["path"])

    def get(self, path: str) -> str:
        """What the metrics port answers; AssertionError for another status than 200."""
        status, text = _get(self.ports[int(self._rendered("--metrics-listen").rpartition(":")[2])], path)
        assert status == 200, f"{path}: {status} {text[:200]}"
        return text

    def listening(self, pid: int) -> tuple[set[int], set[int]]:
        """TCP ports on which the process, or one that it started, waits for connections, as the container has them.

        All of them, and those that other hosts would reach: what it opens on loopback by itself concerns nobody.
        """
        back = {here: there for there, here in self.ports.items()}
        found = {back.get(port, port): is_open or port in back for port, is_open in listening(pid).items()}
        return set(found), {port for port, is_open in found.items() if is_open}

    def _rendered(self, flag: str) -> str:
        return flags(self.manifest["args"])[flag][0]


def on_this_machine(manifests: list[Manifest], checkpoint: Path, folder: Path) -> Container:
    """The producer's container, with `checkpoint` for its model and its volumes in `folder`."""
    manifest, spec = container(manifests), pod(manifests)["spec"]
    places = _mount(manifest, spec["volumes"], folder)
    environment = {one["name"]: _value(one) for one in manifest.get("env", ())}
    ports = {port["containerPort"]: free_port() for port in manifest["ports"]}
    words = [*manifest["command"], *(expand(word, environment) for word in manifest["args"])]
    found = Container(
        words=words,
        environment={name: _moved(value, places) for name, value in environment.items()},
        manifest=manifest,
        grace_s=spec["terminationGracePeriodSeconds"],
        pre_stop_s=manifest.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0),
        ports=ports,
        folder=folder,
    )
    found.words = [_moved(word, places) for word in words[:2]] + [str(checkpoint)]
    found.words += [new for word in words[3:] if (new := _here(_moved(word, places), found))]
    return found


def _here(word: str, container: Container) -> str:
    """A flag as it can be on this machine; "" without it."""
    name, _, value = word.partition("=")
    if name in ("--listen", "--metrics-listen", "--advertise"):
        return f"{name}={HOST}:{container.ports[int(value.rpartition(':')[2])]}"
    if name not in _REPLACED:
        return word
    new = f"{name}={_REPLACED[name]}" if _REPLACED[name] else ""
    if new != word:
        container.changes.append(name)
    return new


def _mount(manifest: Manifest, volumes: list[dict[str, Any]], folder: Path) -> dict[str, str]:
    """Makes a folder of each volume that is mounted; where each mount path is here. What the machine has, stays."""
    by_name = {volume["name"]: volume for volume in volumes}
    places: dict[str, str] = {}
    for mount in manifest["volumeMounts"]:
        path, name = mount["mountPath"], mount["name"]
        if path in ("/tmp", "/dev/shm", "/dev/hugepages"):
            continue
        places[path] = str(folder / name)
        (folder / name).mkdir(parents=True, exist_ok=True)
        for item in by_name[name].get("secret", {}).get("items", ()):
            (folder / name / item["path"]).write_bytes(_secret(item["path"], folder))
    return places


def _secret(name: str, folder: Path) -> bytes:
    """What a secret's file holds: a certificate for loopback, its key, its authority, or tokens."""
    made = folder / "made"
    if not made.is_dir():
        made.mkdir(parents=True)
        authority = Authority()
        authority.issue("producer.example").write(made, "tls")
        authority.write(made, "ca")
    known = made / name
    return known.read_bytes() if known.is_file() else TOKENS.encode()


def _value(entry: dict[str, Any]) -> str:
    source = entry.get("valueFrom")
    if source is None:
        return str(entry.get("value", ""))
    return FACTS.get(source.get("fieldRef", {}).get("fieldPath", ""), "from-a-secret")


def _moved(text: str, places: Mapping[str, str]) -> str:
    """A path in a flag or variable that lies in a volume, where that volume is here."""
    name, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    for path, place in sorted(places.items(), key=lambda item: len(item[0]), reverse=True):
        if value == path or value.startswith(f"{path}/"):
            return f"{name}{equals}{place}{value.removeprefix(path)}"
    return text


def ask_grpc(port: int, service: str) -> str:
    """As the kubelet's gRPC probe: "" where the service of that name is healthy, else what came instead."""
    request = b"\x0a" + bytes([len(service)]) + service.encode()  # HealthCheckRequest{service}
    with grpc.insecure_channel(f"{HOST}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        check: Any = channel.unary_unary(HEALTH_METHOD)
        try:
            answer: bytes = check(request, timeout=_PROBE_S)
        except grpc.RpcError as error:
            return f"{error.code().name}"
    return "" if answer == HEALTH_SERVING else "NOT_SERVING"


def _ask_http(port: int, path: str) -> str:
    try:
        status, text = _get(port, path)
    except OSError as error:
        return str(error)
    return "" if 200 <= status < 400 else f"{status} {text.strip()[:100]}"


def _get(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection(HOST, port, timeout=_PROBE_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def end(service: Service, container: Container) -> tuple[int, float]:
    """Ends it as Kubernetes does, the preStop hook first; its exit status, and the seconds from SIGTERM on.

    Where the grace period was too short, the status is that of SIGKILL. AssertionError: it does not serve any more
    while the hook runs.
    """
    time.sleep(min(1, container.pre_stop_s))
    assert not container.probe("readinessProbe"), "it must serve until its removal is known everywhere"
    began_s = time.monotonic()
    process = Path("/proc") / str(service.pid)
    service.request_stop()
    while process.exists() and time.monotonic() < began_s + container.grace_s:
        time.sleep(_POLL_S)
    seconds = time.monotonic() - began_s  # the container ends with it, and all that it left behind
    ending = service.stop()
    assert ending is not None, "it had ended before"
    return ending.code, seconds
