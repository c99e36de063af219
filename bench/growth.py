"""How the service grows: throughput, latency and memory over what is in flight, pictures, budgets, consumers, producers
and pools, with the limit until which each curve is near-linear.

    python -m bench.growth [--quick] [--only CURVE ...] [--model FOLDER] [--out FOLDER]

Writes `growth.json` and `growth.png`, prints tables and whether each limit is kept, and ends with `GROWTH OK` and 0; or
with `GROWTH BROKEN` and the curves that are not near-linear, or `GROWTH NOISY` and those that others spoiled, and 1.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import machine, ours, simulation, verdicts
from bench.curves import Point, consuming, dispatching, encoding, point, quietest
from bench.growth_plot import draw
from bench.images import pictures
from bench.verdicts import State, Verdict
from producer.wire.contract import GRPC_TRANSPORT, SHM_TRANSPORT
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.processes import LOGS_DIR
from tests.kit.servers import ProducerServer
from tests.kit.stack import Stack

OUT = Path(__file__).parent / "out"
FAMILY = "qwen2_5_vl"
SEED = 20261201
SIDE = 224
SETTINGS: dict[str, object] = {"pool_bytes": 4 << 20}
"""Small, so that the pool is full at once and what it holds is no growth."""
FILL = 400
"""Pictures that fill it."""
PRODUCER_ITEMS = 16
"""In flight for each of several producers."""
STEADY = 8
"""From so many in flight on, all stages have work."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How far the curves go, and how many requests there are at each point."""

    number: int
    repeats: int
    in_flight: tuple[int, ...]
    sides: tuple[int, ...]
    batch_items: tuple[int, ...]
    batch_rows: tuple[int, ...]
    consumers: tuple[int, ...]
    producers: tuple[int, ...]
    pools_gib: tuple[float, ...]
    operations: int


USUAL = Scale(
    number=200,
    repeats=3,
    in_flight=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    sides=(112, 224, 448, 896),
    batch_items=(1, 2, 4, 8, 16, 32),
    batch_rows=(256, 1024, 4096, 16384),
    consumers=(1, 2, 4, 8, 16, 32, 64),
    producers=(1, 2, 3),
    pools_gib=simulation.SIZES_GIB,
    operations=20_000,
)
QUICK = Scale(
    number=48,
    repeats=1,
    in_flight=(1, 8, 32),
    sides=(112, 448),
    batch_items=(1, 32),
    batch_rows=(1024, 16384),
    consumers=(1, 8),
    producers=(1, 2),
    pools_gib=(0.25, 1),
    operations=2_000,
)


@dataclass(slots=True)
class Growth:
    """What was found."""

    curves: dict[str, list[Point]] = field(default_factory=dict)
    pools: list[simulation.PoolFigures] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


class Bench:
    """Starts services and loads them."""

    def __init__(self, stack: Stack, model: Path, scale: Scale) -> None:
        self._stack = stack
        self._model = model
        self._scale = scale
        self._pictures: dict[int, Iterator[bytes]] = {}
        self.found = Growth()

    def in_flight(self) -> None:
        name = "in flight"
        with self._serving() as (server,):
            curve = [self._encoded(x, server, in_flight=x) for x in self._scale.in_flight]
        self._keep(
            name,
            curve,
            verdicts.plateau(name, curve, first=STEADY, within=0.15),
            verdicts.proportional(name, curve, first=STEADY, within=0.25),
            verdicts.tail(name, curve, first=STEADY, most=3),
            verdicts.slope(name, curve, lambda one: one.memory_mib, "MiB", most=1, free=32),
        )

    def side(self) -> None:
        name = "picture's side"
        with self._serving() as (server,):
            curve = [self._encoded(x, server, in_flight=STEADY, side=x) for x in self._scale.sides]
        first = self._scale.sides[-2]
        self._keep(
            name,
            curve,
            verdicts.per_x(name, curve, first=first, power=2, within=0.25),
            verdicts.slope(name, curve, lambda one: one.memory_mib, "MiB", most=0.15, free=32),
        )

    def batch_items(self) -> None:
        self._budget("max_batch_items", self._scale.batch_items)

    def batch_rows(self) -> None:
        self._budget("max_batch_rows", self._scale.batch_rows)

    def consumers(self) -> None:
        for transport in (GRPC_TRANSPORT, SHM_TRANSPORT):
            name = f"consumers, {transport}"
            with self._serving() as (server,):
                curve = [asyncio.run(self._consumed(x, server, transport)) for x in self._scale.consumers]
            self._keep(
                name,
                curve,
                verdicts.plateau(name, curve, first=STEADY, within=0.15),
                verdicts.slope(name, curve, lambda one: one.memory_mib, "MiB", most=0.5, free=32),
            )

    def producers(self) -> None:
        name, parts = "producers", []
        curve = []
        for x in self._scale.producers:
            shares: Counter[str] = Counter()
            with self._serving(number=x) as servers:
                curve.append(asyncio.run(self._dispatched(servers, shares)))
                parts.append([shares[server.address] for server in servers])
        one = curve[0].memory_mib
        self._keep(
            name,
            curve,
            verdicts.never_worse(name, curve, within=0.25),
            verdicts.shares(name, parts, within=0.3),
            verdicts.slope(name, curve, lambda found: found.memory_mib, "MiB", most=1.1 * one, free=0),
        )

    def pool(self) -> None:
        for mix in simulation.MIXES:
            for gib in self._scale.pools_gib:
                self.found.pools.append(simulation.simulate(mix, gib, operations=self._scale.operations, seed=SEED))
                say(simulation.table(self.found.pools)[-1])
        self.found.verdicts += verdicts.pool(self.found.pools, most=4, least_used=0.7, most_evicted=1.2)

    def _budget(self, setting: str, values: Sequence[int]) -> None:
        curve = []
        for x in values:
            with self._serving(settings={setting: x}) as (server,):
                curve.append(self._encoded(x, server, in_flight=32))
        self._keep(setting, curve, verdicts.never_worse(setting, curve, within=0.15))

    @contextmanager
    def _serving(self, *, number: int = 1, settings: dict[str, object] | None = None) -> Iterator[list[ProducerServer]]:
        """`number` services, each with its pool full."""
        made = [
            ours.server(self._model, settings=SETTINGS | (settings or {}), logs=LOGS_DIR / "growth")
            for _ in range(number)
        ]
        for server in made:
            self._stack.start(server)
        self._stack.wait_ready(say)
        for server in made:
            self._encoded(0, server, in_flight=32, number=FILL)
        try:
            yield made
        finally:
            for server in made:
                self._stack.stop(server)

    def _encoded(
        self, x: float, server: ProducerServer, *, in_flight: int, side: int = SIDE, number: int | None = None
    ) -> Point:
        async def run() -> Point:
            async with encoding(server) as send:
                images, least = self._images(side), number or self._scale.number
                return await quietest(lambda: point(x, [server], send, images, in_flight, least), self._repeats(number))

        return asyncio.run(run())

    async def _consumed(self, x: int, server: ProducerServer, transport: str) -> Point:
        async with consuming(server, transport, x) as send:
            images, least = self._images(SIDE), self._scale.number
            return await quietest(lambda: point(x, [server], send, images, x, least), self._scale.repeats)

    async def _dispatched(self, servers: Sequence[ProducerServer], shares: "Counter[str]") -> Point:
        async with dispatching(servers, shares) as send:
            x, images = len(servers), self._images(SIDE)
            least = x * self._scale.number
            return await quietest(
                lambda: point(x, servers, send, images, PRODUCER_ITEMS * x, least), self._scale.repeats
            )

    def _repeats(self, number: int | None) -> int:
        return self._scale.repeats if number is None else 1

    def _images(self, side: int) -> Iterator[bytes]:
        return self._pictures.setdefault(side, pictures(SEED, side))

    def _keep(self, name: str, curve: list[Point], *found: Verdict) -> None:
        self.found.curves[name] = curve
        self.found.verdicts += found
        say("\n".join(table(name, curve)))


CURVES: dict[str, Callable[[Bench], None]] = {
    "in_flight": Bench.in_flight,
    "side": Bench.side,
    "batch_items": Bench.batch_items,
    "batch_rows": Bench.batch_rows,
    "consumers": Bench.consumers,
    "producers": Bench.producers,
    "pool": Bench.pool,
}
started_s = time.monotonic()


def table(name: str, curve: Sequence[Point]) -> list[str]:
    """A curve as text."""
    head = f"{name:>18}  items/s  p50, ms  p99, ms  server CPU, ms  client CPU, ms  memory, MiB  others, cores"
    return [head] + [
        f"{one.x:18g} {one.throughput:8.1f} {one.p50_ms:8.1f} {one.p99_ms:8.1f} {one.server_cpu_ms:15.2f} "
        f"{one.client_cpu_ms:15.2f} {one.memory_mib:12.0f} {one.other_cores:14.2f}"
        for one in curve
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description="How the service grows.")
    parser.add_argument("--quick", action="store_true", help="whether everything can be measured, not what it comes to")
    parser.add_argument(
        "--only", nargs="+", choices=CURVES, default=list(CURVES), metavar="CURVE", help=", ".join(CURVES)
    )
    parser.add_argument("--model", type=Path, help=f"folder of a checkpoint (default: a tiny {FAMILY})")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (default: bench/out)")
    options = parser.parse_args(arguments)
    with Stack() as stack:
        bench = Bench(stack, options.model or cached_checkpoint(FAMILY), QUICK if options.quick else USUAL)
        for name in options.only:
            CURVES[name](bench)
    write(bench.found, options.out)
    return judge(bench.found, is_judged=not options.quick)


def judge(found: Growth, *, is_judged: bool) -> int:
    """Prints the verdicts; the exit status."""
    print()
    if found.pools:
        print(*simulation.table(found.pools), "", sep="\n")
    print(*(one.line() for one in found.verdicts), sep="\n")
    states = {state: dict.fromkeys(one.curve for one in found.verdicts if one.state is state) for state in State}
    if not is_judged:
        print("GROWTH MEASURED: too little to judge it")
        return 0
    for state in (State.BROKEN, State.NOISY):
        if states[state]:
            print(f"GROWTH {state.name}: {', '.join(states[state])}")
            return 1
    print("GROWTH OK")
    return 0


def as_json(found: Growth) -> dict[str, object]:
    """As the results have it."""
    judged = [{**asdict(one), "state": one.state.name} for one in found.verdicts]
    return {**asdict(found), "verdicts": judged}


def write(found: Growth, out: Path) -> None:
    """The results into their folder; curves that were not measured now stay as they are there."""
    out.mkdir(parents=True, exist_ok=True)
    results = {"hardware": machine.hardware(), "versions": machine.versions(), **as_json(found)}
    (out / "growth.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(out / "growth.png", found.curves, found.pools)


def say(text: str) -> None:
    print(f"{time.monotonic() - started_s:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
