"""The agent's own side: one process, one thread, one transport library. See `producer.transport.agent`."""

import base64
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from producer.memory.region import SharedRegion
from producer.transport.agent import BEAT_S, MAX_MESSAGE_BYTES
from producer.transport.base import TransportUnavailableError

_POLL_S = {"outlet": 0.001, "reader": 0.1}
"""How long an agent with no read in flight sleeps: an outlet must keep its library moving for its readers."""
_BUSY_POLL_S = 0.0002


class Backend(Protocol):
    """What a transport library must do inside an agent; one thread calls it."""

    def start(self, region: SharedRegion, options: Mapping[str, str]) -> tuple[str, bytes]:
        """Registers `region`; returns this end's name and the metadata that a reader needs to reach it.

        Raises:
            TransportUnavailableError: the library cannot be used on this machine.
        """

    def post(self, read_id: int, peer: str, peer_metadata: bytes, address: int, offset: int, num_bytes: int) -> None:
        """Begins a read of `num_bytes` at the peer's `address` to `offset` in the region; raises if it cannot."""

    def progress(self) -> list[tuple[int, str]]:
        """Keeps the library moving; returns reads that ended, each with "" or why it failed."""


def _run(backend: Backend, role: str, options: Mapping[str, str], region: SharedRegion, owner: socket.socket) -> None:
    """The agent's one loop; it ends with its owner."""
    name, metadata = backend.start(region, options)
    hello = {"name": name, "metadata": base64.b64encode(metadata).decode(), "address": region.address}
    owner.send(json.dumps(hello).encode())
    in_flight = 0
    beat_s = 0.0
    while True:
        if time.monotonic() > beat_s:
            beat_s = time.monotonic() + BEAT_S
            with contextlib.suppress(BlockingIOError):  # the owner has enough to read
                owner.send(b"{}", socket.MSG_DONTWAIT)
        readable, _, _ = select.select([owner], [], [], _BUSY_POLL_S if in_flight else _POLL_S[role])
        if readable:
            data = owner.recv(MAX_MESSAGE_BYTES)
            if not data:
                return
            in_flight += _post(backend, json.loads(data), owner)
        for read_id, error in backend.progress():
            in_flight -= 1
            owner.send(json.dumps({"id": read_id, "error": error}).encode())


def _post(backend: Backend, message: dict[str, Any], owner: socket.socket) -> bool:
    """Begins the read that `message` asks for; one that cannot begin is answered at once. Whether it is in flight."""
    read_id = message.pop("id")
    metadata = base64.b64decode(message.pop("metadata"))
    try:
        backend.post(read_id, peer_metadata=metadata, **message)
    except Exception as error:  # whatever the library raises, it is the read's failure
        owner.send(json.dumps({"id": read_id, "error": f"{type(error).__name__}: {error}"[:1000]}).encode())
        return False
    return True


def main(arguments: list[str]) -> None:
    """`agent_main BACKEND ROLE OPTIONS REGION_FD SOCKET_FD`: see AgentProcess."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for a whole group, they are the owner's to handle: it drains first
        signal.signal(number, signal.SIG_IGN)
    where, role, options, region_fd, socket_fd = arguments
    owner = socket.socket(fileno=int(socket_fd))
    try:
        module, _, name = where.partition(":")
        backend = getattr(importlib.import_module(module), name)()
        _run(backend, role, json.loads(options), SharedRegion.adopt(int(region_fd)), owner)
    except ConnectionError:
        pass  # the owner has gone
    except TransportUnavailableError as error:
        owner.send(json.dumps({"error": str(error)[:1000], "unavailable": True}).encode())
    except Exception as error:
        owner.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode())
    os._exit(0)  # transport libraries may crash in their exit handlers


if __name__ == "__main__":
    main(sys.argv[1:])
