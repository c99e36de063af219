"""The servers that `bench.gpu` compares: the producer, vLLM's encoder-only instance at several settings, and vLLM that
answers, alone or behind the shim. All on loopback, each with a log of its own.
"""

import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bench.gpu_targets import OURS, PEER
from tests.gpu.conftest import Host
from tests.kit.processes import Service, ServiceError
from tests.kit.servers import ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

Server = TypeVar("Server", bound=Service)
POLL_S = 0.05
START_S, REHEARSAL_START_S = 150.0, 235.0
"""For all that start at the same time."""
PINNING = ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")
"""Of the tests' environment, what makes room for many servers on a small machine: here each is to have all it takes."""
GPU_ENVIRONMENT = {"FLASHINFER_DISABLE_JIT": "1", "SPT_NOENV": "1"}
WEIGHTS = re.compile(r"Loading weights took ([0-9.]+) seconds")

POWERS = (256, 512, 1024, 2048, 4096, 8192)
FINE = (64, 128, *range(256, 2049, 256), 1376, 2744, 4112, 5480, 6848, 8192)
"""Budgets for the peer at its best: the very sizes that are measured here, and multiples of them."""
FUSED = {"rms_norm": ["vllm_c"], "fused_add_rms_norm": ["vllm_c"]}
"""vLLM's own kernels, which it chooses by itself only where Inductor is off."""


def graphs(budgets: Sequence[int], most_items: int = 8) -> dict[str, object]:
    """vLLM's `compilation_config` for graphs of its encoder."""
    return {
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": list(budgets),
        "encoder_cudagraph_max_vision_items_per_batch": most_items,
    }


USUAL = (
    *("--no-enforce-eager", "--max-model-len", "8192", "--max-num-batched-tokens", "16384", "--max-num-seqs", "64"),
    *("--gpu-memory-utilization", "0.2", "--mm-encoder-attn-backend", "FLASH_ATTN"),
    *("--limit-mm-per-prompt", '{"image":1,"video":0}'),
)
QUIET = ("--mm-processor-cache-gb", "0", "--disable-uvicorn-access-log", "--disable-log-stats")
"""Good for the peer where no picture comes twice."""
BEST = (
    *USUAL,
    *("--compilation-config", json.dumps(graphs(FINE, 16))),
    *("--kernel-config", json.dumps({"ir_op_priority": FUSED})),
    *QUIET,
)
PEERS: dict[str, tuple[str, ...]] = {
    PEER: (*USUAL, "--compilation-config", json.dumps(graphs(POWERS))),
    "peer-best": (*BEST, "--renderer-num-workers", "8"),
    "peer-many": (*BEST, "--api-server-count", "4", "--renderer-num-workers", "2"),
    "peer-device": (*BEST, "--renderer-num-workers", "4", "--mm-tensor-ipc", "torch_shm"),
}
"""Flags of `vllm serve`: as installed, with graphs; its best kernels and budgets, with more threads that preprocess;
the same with more processes; the same with its processor on the device.
"""
CPU_PEERS: dict[str, tuple[str, ...]] = dict.fromkeys(PEERS, QUIET)
OUR_FLAGS = ("--mm-encoder-attn-backend", "FLASH_ATTN", "--require-graphs")
ANSWERING = (
    *("--load-format", "dummy", "--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(2 << 30)),
    *("--attention-backend", "TRITON_ATTN", "--max-model-len", "8192", "--max-num-batched-tokens", "16384"),
)
ENCODER_ONLY = ("--mm-encoder-only", "--no-enable-prefix-caching")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where servers run: commands, a model, a folder for logs. `is_gpu` False is a rehearsal on any machine."""

    host: Host
    model: Path
    logs: Path
    is_gpu: bool
    our_flags: tuple[str, ...] = ()
    best_flags: tuple[str, ...] = ()
    num_started: dict[str, int] = field(default_factory=dict)
    """By server, how often it was started: files are in the page cache from the second time on."""

    def ours(self, *flags: str) -> ProducerServer:
        """The producer, not started yet."""
        own = (*(OUR_FLAGS if self.is_gpu else ()), "--drain-s", "0", *flags, *self.our_flags)
        return self._deployed(
            ProducerServer(
                self.model, extra_args=own, env=self._env, name=OURS, bin_dir=self.host.bin_dir, logs=self.logs
            )
        )

    def peer(self, name: str, saved: Path) -> VllmServer:
        """vLLM's encoder-only instance at the settings of that name, which saves embeddings in the folder `saved`."""
        transfer = {
            "ec_connector": "ECExampleConnector",
            "ec_role": "ec_producer",
            "ec_connector_extra_config": {"shared_storage_path": str(saved)},
        }
        return self._vllm(name, *ENCODER_ONLY, *self.flags_of(name), "--ec-transfer-config", json.dumps(transfer))

    def flags_of(self, name: str) -> tuple[str, ...]:
        """Of that peer."""
        return ((PEERS if self.is_gpu else CPU_PEERS)[name]) + (() if name == PEER else self.best_flags)

    def answering(self, name: str, producer: str = "") -> VllmServer:
        """vLLM with weights from nowhere: all of it, or LLM-only behind the shim, with the producer at that address."""
        shim = consumer_args(producer, "shm") if producer else ()
        tower = ("--mm-encoder-attn-backend", "FLASH_ATTN") if self.is_gpu and not producer else ()
        flags = ANSWERING if self.is_gpu else ("--load-format", "dummy")
        return self._vllm(name, *flags, *QUIET[2:], *tower, *shim)

    def _vllm(self, name: str, *flags: str) -> VllmServer:
        return self._deployed(
            VllmServer(
                self.model, extra_args=flags, env=self._env, name=name, bin_dir=self.host.bin_dir, logs=self.logs
            )
        )

    @property
    def _env(self) -> dict[str, str]:
        return {**self.host.env, **(GPU_ENVIRONMENT if self.is_gpu else {})}

    def _deployed(self, server: Server) -> Server:
        """With as many threads as it takes by itself, where there is room for that."""
        if self.is_gpu:
            server._env = {name: value for name, value in server._env.items() if name not in PINNING}
        return server


def start_all(stack: Stack, place: Place, servers: Mapping[str, Service]) -> dict[str, float | str]:
    """All `servers` at the same time, or in a rehearsal one by one; by name, seconds to ready, or why it never was."""
    if place.is_gpu:
        return _start(stack, place, servers)
    return {name: found for one in servers for name, found in _start(stack, place, {one: servers[one]}).items()}


def _start(stack: Stack, place: Place, servers: Mapping[str, Service]) -> dict[str, float | str]:
    for server in servers.values():
        stack.start(server)
    found: dict[str, float | str] = {}
    deadline_s = time.monotonic() + (START_S if place.is_gpu else REHEARSAL_START_S)
    while len(found) < len(servers):
        time.sleep(POLL_S)
        for name, server in servers.items():
            if name not in found:
                found |= _ready(name, server, deadline_s)
    for name in servers:
        place.num_started[name] = place.num_started.get(name, 0) + 1
    return found


def _ready(name: str, server: Service, deadline_s: float) -> dict[str, float | str]:
    try:
        if server.poll_ready():
            return {name: server.age_s}
    except ServiceError as error:  # it ended: the others may go on
        return {name: str(error)}
    return {name: "not ready in time"} if time.monotonic() > deadline_s else {}


def weights_s(log: Path) -> float | None:
    """What a server's vLLM says that loading its weights took; None where it does not."""
    said = WEIGHTS.findall(log.read_text(errors="replace"))
    return sum(map(float, said)) if said else None


def shown(flags: Sequence[str]) -> str:
    """As on a command line."""
    return shlex.join(flags)
