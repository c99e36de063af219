"""Many different pictures through the real service, and a tenth of them again, when the pool has forgotten them.

    python -m tests.gpu.soak ENCODES [FLAG…]    prints the figures; without a GPU too, to try it out

FLAGs are those of `ec-producer serve`. Pictures go as pixels, so that neither end spends its time on a file format.
"""

import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch

from consumer_shim.client import AsyncProducer, Producer, ProducerError
from producer.memory.arena import PAGE_BYTES
from producer.wire.block import BlockError
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.gpu.conftest import Host
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.servers import ProducerServer

SIZES = ((56, 56), (56, 84), (84, 84), (112, 56), (56, 140))
"""Height and width, of 4 to 10 rows in the tiny model; a block of so many rows takes one page of the pool."""
MIN_ENCODES = 2000
"""Of fewer, the pool would still hold what is to be encoded again."""
NUM_CLIENTS = 16
CALL_ITEMS = 32
IN_HAND = NUM_CLIENTS * CALL_ITEMS
POOL_ENTRIES = IN_HAND + 256
"""So few that it is full, and evicts for each encode, from the warm-up on."""
CALL_S = 300.0
"""Long, since the producer refuses what it takes to be too late, and goes by its first and slowest items at first."""
MOST_ERRORS = 100
"""After more it ends early: nothing is learnt from the rest."""
PROGRESS_S = 10.0
COUNTERS = {
    "graph_hits": "ec_producer_graph_hits_total",
    "graph_misses": "ec_producer_graph_misses_total",
    "shared": "ec_producer_items_shared_total",
}


def soak(host: Host, encodes: int, flags: Sequence[str] = (), max_s: float = 3600.0) -> dict[str, Any]:
    """The figures of `encodes` different pictures, of which a tenth, all from the first half, is encoded again.

    Args:
        host: where the producer's command is.
        encodes: at least MIN_ENCODES.
        flags: for the producer, after those that the soak needs.
        max_s: seconds after which no more different pictures are encoded; there are fewer then, and figures all the
            same.
    """
    if encodes < MIN_ENCODES:
        raise ValueError(f"encodes is {encodes}; allowed are {MIN_ENCODES} and more")
    settings = {
        "pool-bytes": POOL_ENTRIES * PAGE_BYTES,
        "max-queue-items": 2 * IN_HAND,
        "item-timeout-s": CALL_S,
        "preprocess-workers": max(1, len(os.sched_getaffinity(0)) * 3 // 4),
    }
    arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    model = cached_checkpoint("qwen2_5_vl")
    server = ProducerServer(model, extra_args=(*arguments, *flags), env=host.env, bin_dir=host.bin_dir, name="soak")
    with server:
        return asyncio.run(_soak(server, encodes, max_s))


async def _soak(server: ProducerServer, encodes: int, max_s: float) -> dict[str, Any]:
    warm_up = encodes // 20
    again = random.Random(encodes).sample(range(encodes // 2), encodes // 10)
    counts = _counts(server)
    async with Clients(server.address, keep=again) as clients:
        first = await clients.encode(range(warm_up))
        usage, started_s = _usage(server), time.monotonic()
        first |= await clients.encode(range(warm_up, encodes), started_s + max_s)
        seconds, num_different = time.monotonic() - started_s, clients.done
        second = await clients.encode([number for number in again if number in first])
    differing = [number for number in again if number in second and second[number] != first.get(number)]
    return {
        "encodes": num_different,
        "replayed": len(second),
        "differences": len(differing),
        "errors": len(clients.errors),
        **_grown(usage, _usage(server)),
        "encodes_per_s": round((num_different - warm_up) / seconds, 1),
        **_grown(counts, _counts(server)),
        "different_embeddings": len(set(first.values())),
        "flags": " ".join(server.command[server.command.index("--pool-bytes") :]),
        "largest_difference": max((_distance(first[one], second[one]) for one in differing if one in first), default=0),
        "first_errors": clients.errors[:5],
    }


class Clients:
    """Several asynchronous clients of one producer. They release what they do not keep, as consumers do."""

    def __init__(self, address: str, keep: Iterable[int]) -> None:
        """The bytes of the embeddings of the pictures `keep` are fetched."""
        self._reader = Producer(address)
        self._clients = [AsyncProducer(address) for _ in range(NUM_CLIENTS)]
        self._keep = frozenset(keep)
        self._spoke_s = time.monotonic()
        self.done = 0
        self.errors: list[str] = []
        """A sentence for each item that has no embedding."""

    async def __aenter__(self) -> "Clients":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.close()
        await asyncio.gather(*(client.close() for client in self._clients))

    async def encode(self, numbers: Iterable[int], until_s: float = math.inf) -> dict[int, bytes]:
        """Encodes the pictures of these numbers, as far as it gets; the embeddings of those that are kept."""
        kept: dict[int, bytes] = {}
        calls = takewhile(lambda _: time.monotonic() < until_s, _calls(numbers))
        await asyncio.gather(*(self._run(client, calls, kept) for client in self._clients))
        return kept

    async def _run(self, client: AsyncProducer, calls: Iterator[list[int]], kept: dict[int, bytes]) -> None:
        for numbers in calls:
            if len(self.errors) > MOST_ERRORS:
                return
            try:
                outcomes = await client.encode([picture(number) for number in numbers], CALL_S)
            except ProducerError as error:
                self.errors += [str(error)] * len(numbers)
                continue
            pairs = zip(numbers, outcomes, strict=True)
            await asyncio.gather(*(self._take(client, number, outcome, kept) for number, outcome in pairs))
            self._tell()

    async def _take(
        self, client: AsyncProducer, number: int, outcome: pb.Ticket | ProducerError, kept: dict[int, bytes]
    ) -> None:
        if isinstance(outcome, ProducerError):
            self.errors.append(str(outcome))
            return
        if number not in self._keep:
            await client.release(outcome.lease_id, CALL_S)
        else:
            try:
                kept[number] = await asyncio.to_thread(self._reader.fetch, outcome, CALL_S)
            except (ProducerError, BlockError) as error:
                self.errors.append(str(error))
                return
        self.done += 1

    def _tell(self) -> None:
        if time.monotonic() - self._spoke_s > PROGRESS_S:
            self._spoke_s = time.monotonic()
            print(f"{self.done} encodes, {len(self.errors)} errors", flush=True)


def picture(number: int) -> pb.MediaItem:
    """Noise that is the same for each number and another for every other."""
    height, width = SIZES[number % len(SIZES)]
    data = random.Random(number).randbytes(height * width * 3)
    return pb.MediaItem(modality=pb.MODALITY_IMAGE, decoded=pb.DecodedMedia(shape=(height, width, 3), data=data))


def _calls(numbers: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(numbers)
    while call := list(islice(rest, CALL_ITEMS)):
        yield call


def _usage(server: ProducerServer) -> dict[str, int]:
    """Memory of the producer's own process, on the host and on the device."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{server.pid}/status").read_text().splitlines())
    return {
        "rss_growth_bytes": int(status["RssAnon"].split()[0]) << 10,
        "device_growth_bytes": int(server.metric("ec_producer_device_bytes", part="held")),
    }


def _counts(server: ProducerServer) -> dict[str, int]:
    return {name: int(server.metric(metric)) for name, metric in COUNTERS.items()}


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in after.items()}


def _distance(first: bytes, second: bytes) -> float:
    """Of two embeddings in bfloat16, what their elements differ by at most."""
    left, right = (torch.frombuffer(bytearray(rows), dtype=torch.bfloat16).float() for rows in (first, second))
    return float((left - right).abs().max())


def main(arguments: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(soak(Host.at(Path(folder)), int(arguments[0]), arguments[1:]), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
