"""The servers that tests and the demo run: vLLM, and `ec-producer serve`.

Both run from the environment of this interpreter (or another's `bin_dir`), on the CPU, offline, with one
thread of computation each, so that several fit on a small machine.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from tests.kit.ports import free_port
from tests.kit.processes import LOGS_DIR, Service
from tests.kit.samples import scraped

BIN = Path(sys.executable).parent
HOST = "127.0.0.1"
SERVED_MODEL = "tiny"
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{BIN}:{os.environ.get('PATH', os.defpath)}",
    "SPT_NOENV": "1",  # a process title must not overwrite the mark that `leftovers` looks for
    "TORCHDYNAMO_DISABLE": "1",  # saves 14 s on the first request with logprobs
    "UCX_NET_DEVICES": "lo",  # NIXL would listen on every interface
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or all instances would share the first core
    "VLLM_NO_USAGE_STATS": "1",
}
# Both sides of a comparison need the same: another mode or type gives other logprobs.
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "seed": 0,
}
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
HEALTH_SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}
PROBE_TIMEOUT_S = 5.0
COUNT_TIMEOUT_S = 10.0
DRAIN_S = 5  # tests leave leases behind
DRAIN_GRACE_S = 40.0  # above the producer's own limits, whatever a test sets
SHIM_CONNECTOR = ("consumer_shim.connector", "ECProducerConnector")
NOISE_CONNECTOR = ("tests.kit.noise_connector", "NoiseConnector")
NOISE_SWITCH = "EC_PRODUCER_NOISE_IF"
"""Names a file in the environment: the noise connector spoils embeddings while it is there, or always without this."""


class ScrapedService(Service):
    """One that serves Prometheus metrics at `metrics_url`."""

    metrics_url: str

    def scrape(self) -> str:
        """All of its metrics, as text."""
        return _get(self.metrics_url)[1]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels; 0 where there is none yet."""
        return scraped(self.scrape(), name, **labels)

    def metric_reaching(self, least: float, name: str, **labels: str) -> float:
        """As `metric`, once it is at least `least`: some counts come shortly after the answer that caused them."""
        deadline_s = time.monotonic() + COUNT_TIMEOUT_S
        while (value := self.metric(name, **labels)) < least and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return value


class VllmServer(ScrapedService):
    """`vllm serve MODEL`, with its OpenAI API at `url`; the model's name there is `tiny`."""

    def __init__(
        self,
        model: Path,
        *,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        name: str = "vllm",
        port: int | None = None,
        bin_dir: Path = BIN,
        cwd: Path | None = None,
        logs: Path = LOGS_DIR,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.metrics_url = f"{self.url}/metrics"
        command = [str(bin_dir / "vllm"), "serve", str(model), "--served-model-name", SERVED_MODEL]
        command += [*_flags(ENGINE), "--host", HOST, "--port", str(self.port), *extra_args]
        super().__init__(name, command, ready=self._healthy, env=ENVIRONMENT | dict(env or {}), cwd=cwd, logs=logs)

    def _healthy(self) -> bool:
        try:
            return _get(f"{self.url}/health")[0] == HTTPStatus.OK
        except (OSError, HTTPException):
            return False


class ProducerServer(ScrapedService):
    """`ec-producer serve MODEL`, with gRPC at `address` and Prometheus metrics at `metrics_url`."""

    def __init__(
        self,
        model: Path,
        *,
        transports: Sequence[str] = ("grpc",),
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        name: str = "producer",
        port: int | None = None,
        metrics_port: int | None = None,
        bin_dir: Path = BIN,
        cwd: Path | None = None,
        logs: Path = LOGS_DIR,
    ) -> None:
        self.address = f"{HOST}:{port or free_port()}"
        metrics_address = f"{HOST}:{metrics_port or free_port()}"
        self.metrics_url = f"http://{metrics_address}/metrics"
        command = [str(bin_dir / "ec-producer"), "serve", str(model), "--listen", self.address]
        command += ["--metrics-listen", metrics_address]
        command += [word for transport in transports for word in ("--transport", transport)]
        command += ["--drain-s", str(DRAIN_S), *extra_args]
        super().__init__(
            name,
            command,
            ready=self._serving,
            env=ENVIRONMENT | dict(env or {}),
            cwd=cwd,
            logs=logs,
            grace_s=DRAIN_GRACE_S,
        )

    def _serving(self) -> bool:
        """Ask grpc.health.v1 about the whole server, without needing its generated stubs."""
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(self.address, options=options) as channel:
            check: Callable[..., bytes] = channel.unary_unary(HEALTH_METHOD)
            try:
                return check(b"", timeout=PROBE_TIMEOUT_S) == HEALTH_SERVING
            except grpc.RpcError:
                return False

    @property
    def is_serving(self) -> bool:
        """Whether it says that it can be used."""
        return self._serving()


def consumer_args(
    producer_address: str,
    transport: str,
    *,
    connector: tuple[str, str] = SHIM_CONNECTOR,
    without: Sequence[str] = ("image", "video"),
    **settings: Any,
) -> list[str]:
    """The flags that make `vllm serve` LLM-only: no encoder `without` these modalities, which that producer encodes.

    `settings` are more of the shim's.
    """
    module, class_name = connector
    transfer: dict[str, Any] = {
        "ec_connector": class_name,
        "ec_connector_module_path": module,
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"producers": [producer_address], "transport": transport, **settings},
    }
    return [
        *("--limit-mm-per-prompt", json.dumps(dict.fromkeys(without, 0))),
        *("--ec-transfer-config", json.dumps(transfer)),
        *("--middleware", "consumer_shim.middleware.EncodeMiddleware"),
    ]


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as command-line flags; those that are True have no value there."""
    words = []
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def _get(url: str) -> tuple[int, str]:
    """Status and body, at little cost: servers are polled while they need the machine to start."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=PROBE_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", parts.path)
        response = connection.getresponse()
        return response.status, response.read().decode()
