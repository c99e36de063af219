"""Mooncake's TransferEngine as a transport, without a metadata server. The library is imported in the agent only.

It listens on every interface, on two ports between MC_MIN_RPC_PORT and MC_MAX_RPC_PORT, and takes writes from anyone
there. A peer is known by address and port alone: a producer that was started again on the same ones answers for the old
one, and only the block's header tells.
"""

import ctypes
import importlib
import importlib.util
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from producer.memory.region import SharedRegion
from producer.transport.agent import MAX_UNSETTLED, AgentOutlet, AgentProcess, AgentReader
from producer.transport.base import TransportUnavailableError

NAME = "mooncake"
_BACKEND = f"{__name__}:MooncakeBackend"
_MAX_MET = 1024
_CHECK_S = 10.0
_DEBIAN = {"libcurl.so.4": "libcurl4", "libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1"}
"""The packages of the system libraries that its wheel links and does not bring."""
_RDMA_DEVICES = Path("/sys/class/infiniband")


def open_outlet(region: SharedRegion, options: Mapping[str, str]) -> AgentOutlet:
    """The producer's end over `region`.

    Args:
        region: what peers read.
        options: "host", the address that this end announces, and "protocol", one of
            `producer.transport.registry.MOONCAKE_PROTOCOLS`.

    Raises:
        TransportUnavailableError: Mooncake, a system library or the protocol's device is missing.
        TransportError: the agent did not start.
    """
    _find()
    return AgentOutlet(NAME, AgentProcess(_BACKEND, "outlet", region, options))


def open_reader(region: SharedRegion, options: Mapping[str, str]) -> AgentReader:
    """A consumer's end that lands in `region`; otherwise as `open_outlet`."""
    _find()
    return AgentReader(NAME, AgentProcess(_BACKEND, "reader", region, options))


def _find() -> None:
    if importlib.util.find_spec("mooncake") is None:
        raise TransportUnavailableError("Mooncake is not installed; pip install 'ec-producer[mooncake]'")


class MooncakeBackend:
    """A TransferEngine (`producer.transport.agent_main.Backend`).

    Beginning a read talks with the peer, for up to a minute if it stands still. So that is done on threads of its own,
    one for each read that an owner may have in flight.
    """

    def start(self, region: SharedRegion, options: Mapping[str, str]) -> tuple[str, bytes]:
        host, self._protocol = options["host"], options["protocol"]
        _set_environment(host, self._protocol)
        self._engine = _load()()
        if self._engine.initialize(host, "P2PHANDSHAKE", self._protocol, ""):  # any call after a failure crashes
            raise RuntimeError(f"Mooncake does not start at {host}: no device, or no free port in its range")
        if self._engine.register_memory(region.address, region.num_bytes):
            raise RuntimeError(f"Mooncake cannot register {region.num_bytes} bytes")
        self._base = region.address
        self._met: set[str] = set()
        self._threads = ThreadPoolExecutor(MAX_UNSETTLED, thread_name_prefix="begin")
        self._begun: SimpleQueue[tuple[int, int, str]] = SimpleQueue()
        self._batches: dict[int, int] = {}  # read -> the library's number for it
        name = f"{f'[{host}]' if ':' in host else host}:{self._engine.get_rpc_port()}"
        if self._protocol == "tcp":
            self._check(name)
        return name, self._protocol.encode()

    def post(self, read_id: int, peer: str, peer_metadata: bytes, address: int, offset: int, num_bytes: int) -> None:
        theirs = peer_metadata.decode()
        if theirs != self._protocol:
            raise ValueError(f"the producer's Mooncake uses {theirs}, this side's {self._protocol}")
        self._threads.submit(self._begin, read_id, peer, address, self._base + offset, num_bytes)

    def progress(self) -> list[tuple[int, str]]:
        ended = []
        while not self._begun.empty():
            read_id, batch, error = self._begun.get()
            if batch:
                self._batches[read_id] = batch
            else:
                ended.append((read_id, error))
        for read_id, batch in list(self._batches.items()):
            state = self._engine.transfer_check_status(batch)  # 1 and -1 are ends, and the batch is gone
            if state in (1, -1):
                del self._batches[read_id]
                ended.append((read_id, "" if state == 1 else "Mooncake: the peer has gone or refused the read"))
        return ended

    def _begin(self, read_id: int, peer: str, address: int, local: int, num_bytes: int) -> None:
        """On one of the threads: meets the peer and posts the read."""
        batch, error = 0, f"Mooncake: {peer} does not answer"
        try:
            if self._meet(peer):
                batch = self._engine.batch_transfer_async_read(peer, [local], [address], [num_bytes])
        except Exception as raised:  # whatever the library raises, it is the read's failure
            error = f"Mooncake: {type(raised).__name__}: {raised}"
        self._begun.put((read_id, batch, error))

    def _meet(self, peer: str) -> bool:
        """Whether `peer` answers. The library meets a new peer under a lock that all reads take, so we ask before."""
        if peer not in self._met:
            if self._engine.send_probe(peer):
                return False
            if len(self._met) >= _MAX_MET:
                self._met.clear()
            self._met.add(peer)
        return True

    def _check(self, name: str) -> None:
        """Reads from itself: another process may have taken the port for data while the engine came up."""
        memory = ctypes.create_string_buffer(b"\1", 2)
        address = ctypes.addressof(memory)
        self._engine.register_memory(address, len(memory))
        batch = self._engine.batch_transfer_async_read(name, [address + 1], [address], [1])
        deadline = time.monotonic() + _CHECK_S
        while batch and not (state := self._engine.transfer_check_status(batch)) and time.monotonic() < deadline:
            time.sleep(0.001)
        if not batch or state != 1:
            raise RuntimeError(f"Mooncake cannot be reached at {name}, where it should listen")
        self._engine.unregister_memory(address)


def _load() -> Any:
    """The engine's class."""
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        missing = [package for library, package in _DEBIAN.items() if not _can_load(library)]
        if not missing:
            raise
        text = f"Mooncake lacks system libraries; apt-get install {' '.join(missing)} ({error})"
        raise TransportUnavailableError(text) from None


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _set_environment(host: str, protocol: str) -> None:
    """What the library reads; its `initialize` takes no notice of the protocol."""
    if protocol == "rdma" and not any(_RDMA_DEVICES.glob("*")):
        raise TransportUnavailableError("mooncake_protocol is 'rdma', but this machine has no RDMA device")
    for name in ("MC_LOG_DIR", "MC_FORCE_TCP", "MC_FORCE_HCA"):  # the first would abort the process
        os.environ.pop(name, None)
    os.environ["MC_FORCE_TCP" if protocol == "tcp" else "MC_FORCE_HCA"] = "1"
    if ":" in host:
        os.environ["MC_USE_IPV6"] = "1"  # and no other
    os.environ["MC_DISABLE_METACACHE"] = "1"  # else a peer that starts again elsewhere in memory fails for ever
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "5")
