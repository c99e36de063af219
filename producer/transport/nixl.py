"""NIXL (UCX) as a transport. The library is imported in the agent only.

Its own progress thread burns a core, so the agent's loop moves it. On one host it copies with CMA inside `transfer`.
"""

import importlib
import importlib.util
import os
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from producer.memory.region import SharedRegion
from producer.transport.agent import AgentOutlet, AgentProcess, AgentReader
from producer.transport.base import TransportUnavailableError

NAME = "nixl"
_MODULES = ("nixl_cu13", "nixl_cu12", "nixl")
_MAX_PEERS = 64
_BACKEND = f"{__name__}:NixlBackend"


def open_outlet(region: SharedRegion, options: Mapping[str, str]) -> AgentOutlet:
    """The producer's end over `region`; `options` may have "devices", as UCX_NET_DEVICES takes them.

    Raises:
        TransportUnavailableError: NIXL is not installed.
        TransportError: the agent did not start.
    """
    _find()
    return AgentOutlet(NAME, AgentProcess(_BACKEND, "outlet", region, options))


def open_reader(region: SharedRegion, options: Mapping[str, str]) -> AgentReader:
    """A consumer's end that lands in `region`; raises as `open_outlet` does."""
    _find()
    return AgentReader(NAME, AgentProcess(_BACKEND, "reader", region, options))


def _find() -> str:
    for name in _MODULES:
        if importlib.util.find_spec(name) is not None:
            return name
    raise TransportUnavailableError("NIXL is not installed; pip install 'ec-producer[nixl]'")


class NixlBackend:
    """A NIXL agent (`producer.transport.agent_main.Backend`)."""

    def start(self, region: SharedRegion, options: Mapping[str, str]) -> tuple[str, bytes]:
        if options.get("devices"):
            os.environ["UCX_NET_DEVICES"] = options["devices"]
        api: Any = importlib.import_module(f"{_find()}._api")
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._name = f"ec-producer-{secrets.token_hex(8)}"  # a new name for each life: a peer must not be mistaken
        self._agent = api.nixl_agent(self._name, config)
        self._agent.register_memory([(region.address, region.num_bytes, 0, "")], "DRAM")
        self._base = region.address
        self._peers: OrderedDict[str, int] = OrderedDict()  # name -> reads in flight, least recently used first
        self._handles: dict[int, tuple[str, Any]] = {}
        return self._name, self._agent.get_agent_metadata()

    def post(self, read_id: int, peer: str, peer_metadata: bytes, address: int, offset: int, num_bytes: int) -> None:
        self._meet(peer, peer_metadata)
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs([(self._base + offset, num_bytes, 0)], "DRAM"),
            self._agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM"),
            peer,
        )
        try:
            self._agent.transfer(handle)
        except BaseException:
            handle.release()
            raise
        self._handles[read_id] = (peer, handle)
        self._peers[peer] += 1

    def progress(self) -> list[tuple[int, str]]:
        self._agent.get_new_notifs()
        ended = []
        for read_id, (peer, handle) in list(self._handles.items()):
            state, error = self._state(handle)
            if state != "PROC":
                del self._handles[read_id]
                self._peers[peer] -= 1
                handle.release()
                ended.append((read_id, error))
        return ended

    def _state(self, handle: Any) -> tuple[str, str]:
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:  # the library raises its own types when a peer has gone
            return "ERR", f"NIXL: {error}"
        return state, "" if state in ("DONE", "PROC") else f"NIXL ended the read with {state}"

    def _meet(self, peer: str, metadata: bytes) -> None:
        if peer in self._peers:
            self._peers.move_to_end(peer)
            return
        idle = next((name for name, in_flight in self._peers.items() if not in_flight), None)
        if len(self._peers) >= _MAX_PEERS and idle is not None:
            del self._peers[idle]
            self._agent.remove_remote_agent(idle)
        self._agent.add_remote_agent(metadata)
        self._peers[peer] = 0
