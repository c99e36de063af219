"""A producer without an encoder: real pool, servicer and outlets, in a process that a test may stop and kill.

    python -m tests.integration.transports.producer_process PORT POOL_BYTES LEASE_S TRANSPORT...

It takes one JSON command a line and answers each with one JSON line; it ends when its input does. It does not
reproduce encoding: `Encode` is never called.
"""

import asyncio
import json
import os
import random
import secrets
import sys
import threading
from typing import Any, TextIO

import grpc

from producer.core import EmbeddingInfo, Lease
from producer.embedding_pool import EmbeddingPool
from producer.memory.region import SharedRegion
from producer.metrics import Metrics
from producer.server import Servicer
from producer.transport import registry
from producer.transport.agent import AgentOutlet
from producer.transport.base import Outlet
from producer.transport.stream import StreamOutlet
from producer.wire.block import HEADER_BYTES, EmbeddingShape
from producer.wire.contract import GRPC_TRANSPORT, WIRE_VERSION
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import add_EncoderCacheServicer_to_server

WIDTH = 64
DTYPE = "float32"
OPTIONS = {"nixl": {"devices": "lo"}, "mooncake": {"host": "127.0.0.1", "protocol": "tcp"}}
"""Loopback only."""


def shape_of(num_rows: int) -> EmbeddingShape:
    return EmbeddingShape(num_rows=num_rows, width=WIDTH, dtype=DTYPE)


def rows_of(key: str, num_rows: int) -> bytes:
    """The bytes of an embedding; the same in every process."""
    return random.Random(key).randbytes(shape_of(num_rows).payload_bytes)


class Pool(EmbeddingPool):
    """Remembers all leases, so that a test can end one that it does not know."""

    def __init__(self, region: SharedRegion, **settings: Any) -> None:
        super().__init__(region, **settings)
        self.granted: list[str] = []

    def grant(self, key: str, transport: str = "", *, replaces: str = "") -> Lease:
        lease = super().grant(key, transport, replaces=replaces)
        self.granted.append(lease.lease_id)
        return lease


class Scribbler(threading.Thread):
    """Writes zeros and the right bytes over some memory, in turn; in the end, half of it is wrong."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(daemon=True)
        self._memory = memory
        self._right = bytes(memory)
        self._resting = threading.Event()

    def run(self) -> None:
        while not self._resting.is_set():
            self._memory[:] = bytes(len(self._right))
            self._memory[:] = self._right
        half = len(self._right) // 2
        self._memory[:half] = bytes(half)

    def rest(self) -> None:
        self._resting.set()
        self.join()


class Commands:
    """What a test can ask for."""

    def __init__(self, pool: Pool, region: SharedRegion, outlets: dict[str, Outlet], epoch: str) -> None:
        self._pool = pool
        self._region = region
        self._outlets = outlets
        self._epoch = epoch
        self._scribbler: Scribbler | None = None

    def do(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Runs one command; its result, or the error that it raised."""
        try:
            return {"result": getattr(self, name)(*arguments)}
        except Exception as error:
            return {"error": repr(error)}

    def put(self, key: str, num_rows: int) -> dict[str, Any]:
        """Publishes an embedding and gives the fields of its ticket."""
        info = EmbeddingInfo(modality="image", shape=shape_of(num_rows), content_part={})
        self._pool.put(key, info, memoryview(rows_of(key, num_rows)))
        return {"key": key, "num_rows": num_rows, "epoch": self._epoch, "lease_id": self._pool.grant(key).lease_id}

    def release(self, lease_id: str) -> bool:
        return self._pool.release(lease_id) is not None

    def release_all(self) -> bool:
        """Ends all leases; whether there were any."""
        return sum(map(self.release, self._pool.granted)) > 0

    def evict(self, key: str) -> bool:
        """Puts twice the pool's size of other embeddings into it; whether `key` had to go."""
        num_rows = 4000
        for number in range(2 * self._region.num_bytes // shape_of(num_rows).payload_bytes):
            self.release(self.put(f"e{number:063x}", num_rows)["lease_id"])
        return self._pool.store.lookup(key) is None

    def scribble(self, key: str) -> None:
        """Rewrites the rows of `key` all the time, until `rest`."""
        lease = self._pool.grant(key)
        start = lease.offset + HEADER_BYTES
        self._scribbler = Scribbler(self._region.view[start : start + lease.info.shape.payload_bytes])
        self._scribbler.start()

    def rest(self) -> None:
        """Ends `scribble`; half of the block is wrong from now on."""
        assert self._scribbler is not None
        self._scribbler.rest()

    def num_leases(self) -> int:
        return self._pool.num_leases

    def environ(self, name: str, value: str) -> None:
        """An environment variable for agents that are started from now on."""
        os.environ[name] = value

    def agents(self) -> list[int]:
        """Process ids of the outlets' agents that are up."""
        outlets = (outlet for outlet in self._outlets.values() if isinstance(outlet, AgentOutlet))
        return [outlet.agent.pid for outlet in outlets if outlet.is_up]


def open_outlet(name: str, region: SharedRegion) -> Outlet:
    return StreamOutlet() if name == GRPC_TRANSPORT else registry.open_outlet(name, region, OPTIONS[name])


def answers_only() -> TextIO:
    """The standard output for answers alone: libraries that print do so to the error output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


async def main(port: int, pool_bytes: int, lease_s: float, transports: list[str]) -> None:
    answers = answers_only()
    epoch = secrets.randbits(64)
    region = SharedRegion.create("test-pool", pool_bytes)
    pool = Pool(region, epoch=epoch, lease_s=lease_s, max_leases=1000)
    outlets = {name: open_outlet(name, region) for name in transports}
    info = pb.GetModelInfoResponse(transports=transports, epoch=f"{epoch:016x}", wire_version=WIRE_VERSION)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = Servicer(None, pool, outlets, info, Metrics(), settings={})  # type: ignore[arg-type]
    add_EncoderCacheServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(json.dumps({"result": "ready"}), file=answers)
    commands = Commands(pool, region, outlets, info.epoch)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(commands.do(*json.loads(line))), file=answers)
    await server.stop(grace=0)
    for outlet in outlets.values():
        outlet.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
