"""Both sides under the same load: the same pictures, each of them once, one side after the other."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from bench.load import Result, Send, closed, opened
from bench.memory import busy_seconds, cpu_seconds, parent, thread_cpu_seconds, tree
from tests.kit.samples import scraped
from tests.kit.servers import ScrapedService

OPEN_MOST = 128
"""Requests of an open load that are under way: fewer than a producer admits by default."""
WARM = 192
"""Requests before each load, which are not measured: enough for the steps that come often to be recorded."""
REST_S = 15.0
REST_POLL_S = 0.5
RESTING = 0.05
"""Of a core: what a server with nothing to do may take."""
COUNTS: dict[str, tuple[str, Mapping[str, str]]] = {
    **{stage: ("ec_producer_stage_seconds_sum", {"stage": stage}) for stage in ("preprocess", "encode", "publish")},
    "waiting": ("ec_producer_queue_seconds_sum", {}),
    "items": ("ec_producer_step_items_sum", {}),
    "steps": ("ec_producer_step_items_count", {}),
}
"""Where the producer's own metrics have what its stages took, in seconds, and how many items and steps there were."""

WARM_IN_FLIGHT = 32
"""Before an open load."""

Load = Callable[[Send[bytes], Sequence[bytes]], Awaitable[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two: its server, and how a picture is sent there."""

    name: str
    server: ScrapedService
    request: Callable[[bytes], bytes]
    """The bytes of a request for a picture, made before they are sent."""
    client: Callable[[], AbstractAsyncContextManager[Send[bytes]]]

    def pids(self) -> list[int]:
        """Of the server's processes. The one above them supervises them for this bench, and is none of them."""
        return tree(parent(self.server.pid))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What came of one load on one side."""

    side: str
    repeat: int
    load: Mapping[str, float]
    """`in_flight` of a closed load, or the `rate` of an open one, arrivals a second."""
    result: Result
    threads_cpu_s: Mapping[str, float]
    """What each thread of the server computed meanwhile."""
    server_cpu_s: float
    idle_cores: float
    """How many cores the other side's server was busy on, which had nothing to do."""
    other_cores: float
    """How many cores were busy with what is neither a server nor the client: noise."""
    stages: Mapping[str, float]
    """By the names of `COUNTS`, where the server has such metrics."""

    @property
    def figures(self) -> dict[str, float]:
        """What it comes to; CPU is that of one request."""
        requests = self.result.num_requests
        return {
            "requests": requests,
            "seconds": self.result.seconds,
            "throughput": self.result.throughput,
            "p50_ms": self.result.p50_s * 1000,
            "p99_ms": self.result.p99_s * 1000,
            "server_cpu_ms": self.server_cpu_s / requests * 1000,
            "client_cpu_ms": self.result.client_cpu_s / requests * 1000,
            "idle_cores": self.idle_cores,
            "other_cores": self.other_cores,
        }

    def row(self) -> dict[str, object]:
        """As the results have it."""
        return {"side": self.side, "repeat": self.repeat, **self.load, **self.figures}


async def closed_samples(
    sides: Sequence[Side], pictures: Iterator[bytes], in_flights: Sequence[int], *, repeat: int, least: int, rounds: int
) -> list[Sample]:
    """So many in flight on each side in turn: `rounds` requests for each of them, and `least` or more in all."""

    async def sample(side: Side, images: Sequence[bytes], in_flight: int) -> Sample:
        return await sampled(
            side,
            sides,
            images,
            lambda send, bodies: closed(send, bodies, in_flight),
            repeat=repeat,
            load={"in_flight": in_flight},
        )

    found = []
    for in_flight in in_flights:
        images = [*itertools.islice(pictures, WARM + max(least, rounds * in_flight))]
        found += [await sample(side, images, in_flight) for side in sides]
    return found


async def open_samples(
    sides: Sequence[Side], pictures: Iterator[bytes], rates: Sequence[float], *, seconds: float, seed: int
) -> list[Sample]:
    """Arrivals at each rate for so many seconds, at the same moments on each side."""

    async def sample(side: Side, images: Sequence[bytes], rate: float) -> Sample:
        return await sampled(
            side,
            sides,
            images,
            lambda send, bodies: opened(send, bodies, rate, seed=seed, most=OPEN_MOST),
            load={"rate": rate},
        )

    found = []
    for rate in rates:
        images = [*itertools.islice(pictures, WARM + max(1, int(rate * seconds)))]
        found += [await sample(side, images, rate) for side in sides]
    return found


async def sampled(
    side: Side, sides: Sequence[Side], images: Sequence[bytes], run: Load, *, load: Mapping[str, float], repeat: int = 0
) -> Sample:
    """`run` on all `images` but the first ones, over a connection of its own, while the other `sides` rest."""
    bodies = [side.request(image) for image in images]
    pids, idle = side.pids(), [pid for other in sides if other is not side for pid in other.pids()]
    await rest(idle)
    async with side.client() as send:
        await closed(send, bodies[:WARM], int(load.get("in_flight", WARM_IN_FLIGHT)))
        before, stages, threads_s = _cpu(pids, idle), _stages(side), thread_cpu_seconds(pids)
        result = await run(send, bodies[WARM:])
        after, after_s = _cpu(pids, idle), thread_cpu_seconds(pids)
    server_s, idle_s, all_s = (now - then for now, then in zip(after, before, strict=True))
    return Sample(
        side=side.name,
        repeat=repeat,
        load=load,
        result=result,
        threads_cpu_s={name: value - threads_s.get(name, 0.0) for name, value in after_s.items()},
        server_cpu_s=server_s,
        idle_cores=idle_s / result.seconds,
        other_cores=max(0.0, all_s - server_s - idle_s - result.client_cpu_s) / result.seconds,
        stages={name: value - stages.get(name, 0.0) for name, value in _stages(side).items()},
    )


async def rest(pids: list[int], within_s: float = REST_S) -> None:
    """Waits until these processes compute next to nothing; vLLM's go on looking for work for a second."""
    deadline_s = time.monotonic() + within_s
    before_s, busy = cpu_seconds(pids), True
    while busy and time.monotonic() < deadline_s:
        await asyncio.sleep(REST_POLL_S)
        now_s = cpu_seconds(pids)
        busy, before_s = now_s - before_s > RESTING * REST_POLL_S, now_s


def _cpu(pids: list[int], idle: list[int]) -> tuple[float, float, float]:
    """What the loaded server, the others and the whole machine have computed so far, in seconds."""
    return cpu_seconds(pids), cpu_seconds(idle), busy_seconds()


def _stages(side: Side) -> dict[str, float]:
    text = side.server.scrape()
    if "ec_producer_stage_seconds" not in text:
        return {}
    return {name: scraped(text, metric, **labels) for name, (metric, labels) in COUNTS.items()}
