"""Where an encoder of its own loses: one vLLM with everything, and an LLM-only one with shim and producer; one machine.

    python -m bench.break_even [--quick] [--model FOLDER] [--out FOLDER]

Both are sent the same chat requests, one at a time and in turn, with tiny models: what differs is what the way through
a second service costs, which a larger encoder has to save before it pays. Writes `break_even.json`, prints a table.
"""

import argparse
import asyncio
import base64
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import machine, ours, peer
from bench.images import pictures
from bench.load import closed
from bench.memory import cpu_seconds, memory, parent, tree
from producer.wire.contract import SHM_TRANSPORT
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.processes import LOGS_DIR
from tests.kit.servers import SERVED_MODEL, ScrapedService, VllmServer, consumer_args
from tests.kit.stack import Stack

OUT = Path(__file__).parent / "out"
FAMILY = "qwen2_5_vl"
SEED = 20261202
MIB = 1 << 20
SIDES = (0, 56, 112, 224, 448, 896)
"""Of the picture of a request, pixels; 0 for a request without one."""
WORDS = (8, 200)
"""Of its text."""
IN_FLIGHT = 8
SPLIT, WHOLE = "split", "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """One of the two: what answers chat requests at `url`, and all services that it takes."""

    name: str
    url: str
    services: Sequence[ScrapedService]

    def pids(self) -> list[int]:
        return [pid for service in self.services for pid in tree(parent(service.pid))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one kind of request takes, in each set-up; medians."""

    side: int
    words: int
    again: bool
    """Whether every request has the same picture, which both keep."""
    whole_ms: float
    split_ms: float
    whole_cpu_ms: float
    split_cpu_ms: float
    in_flight: int

    @property
    def more_ms(self) -> float:
        return self.split_ms - self.whole_ms


def body(image: bytes | None, words: int, number: int) -> bytes:
    """A chat request that asks for one token; its text is another for each `number`."""
    text = f"{number} " + "word " * words
    content: list[Mapping[str, object]] = [{"type": "text", "text": text}]
    if image is not None:
        url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": SERVED_MODEL, "max_tokens": 1, "messages": messages}).encode()


class BreakEven:
    """Both set-ups, and what is sent to them."""

    def __init__(self, set_ups: Sequence[SetUp], number: int) -> None:
        self._set_ups = set_ups
        self._number = number
        self._counter = itertools.count()
        self._pictures: dict[int, Iterator[bytes]] = {}

    async def row(self, side: int, words: int, *, again: bool = False, in_flight: int = 1) -> Row:
        """Sends requests to each set-up in turn, a few at a time."""
        taken: dict[str, list[float]] = {SPLIT: [], WHOLE: []}
        cpu_s = dict.fromkeys(taken, 0.0)
        same = next(self._images(side)) if again and side else None
        async with AsyncExitStack() as stack:
            clients = {one.name: await stack.enter_async_context(peer.client(one.url)) for one in self._set_ups}
            for turn in range(-1, 3):  # the first is not measured
                for set_up in self._set_ups:
                    bodies = [self._body(side, words, same) for _ in range(max(self._number // 3, in_flight))]
                    before_s = cpu_seconds(set_up.pids())
                    result = await closed(clients[set_up.name], bodies, in_flight)
                    if turn >= 0:
                        taken[set_up.name] += result.latencies_s
                        cpu_s[set_up.name] += cpu_seconds(set_up.pids()) - before_s
        median_ms = {name: statistics.median(found) * 1000 for name, found in taken.items()}
        cpu_ms = {name: cpu_s[name] / len(taken[name]) * 1000 for name in taken}
        return Row(
            side=side,
            words=words,
            again=again,
            whole_ms=median_ms[WHOLE],
            split_ms=median_ms[SPLIT],
            whole_cpu_ms=cpu_ms[WHOLE],
            split_cpu_ms=cpu_ms[SPLIT],
            in_flight=in_flight,
        )

    def _body(self, side: int, words: int, same: bytes | None) -> bytes:
        image = same or (next(self._images(side)) if side else None)
        return body(image, words, next(self._counter))

    def _images(self, side: int) -> Iterator[bytes]:
        return self._pictures.setdefault(side, pictures(SEED, side))


def set_ups(stack: Stack, model: Path) -> list[SetUp]:
    """Starts both, ready."""
    logs = LOGS_DIR / "break-even"
    producer = ours.server(model, settings={"pool_bytes": 64 << 20}, logs=logs)
    consumer = VllmServer(model, extra_args=consumer_args(producer.address, SHM_TRANSPORT), name="consumer", logs=logs)
    whole = VllmServer(model, name="whole", logs=logs)
    for service in (producer, consumer, whole):
        stack.start(service)
        stack.wait_ready(say)  # one after the other: three at once need more memory than they keep
    return [
        SetUp(name=WHOLE, url=whole.url, services=[whole]),
        SetUp(name=SPLIT, url=consumer.url, services=[consumer, producer]),
    ]


async def measure(bench: BreakEven, sides: Sequence[int], words: Sequence[int]) -> list[Row]:
    """All rows."""
    found = []
    for side in sides:
        found += [await bench.row(side, number) for number in words]
    found += [await bench.row(side, words[0], again=True) for side in sides[-2:]]
    found += [await bench.row(side, words[0], in_flight=IN_FLIGHT) for side in sides[-3:]]
    return found


def table(rows: Sequence[Row], memory_mib: Mapping[str, float]) -> list[str]:
    """As text."""
    head = "side  words  in flight  picture     whole, ms  split, ms  more, ms  whole CPU, ms  split CPU, ms"
    lines = [
        f"{one.side:4} {one.words:6} {one.in_flight:10}  {_kind(one):9} {one.whole_ms:11.1f} {one.split_ms:10.1f} "
        f"{one.more_ms:9.1f} {one.whole_cpu_ms:14.1f} {one.split_cpu_ms:14.1f}"
        for one in rows
    ]
    held = ", ".join(f"{name} {value:.0f} MiB" for name, value in memory_mib.items())
    return [head, *lines, f"memory, unique to their processes: {held}", conclusion(rows)]


def _kind(row: Row) -> str:
    return "none" if not row.side else "the same" if row.again else "new"


def conclusion(rows: Sequence[Row]) -> str:
    """From which side on the split is faster, or what it costs a picture, and so has to save elsewhere."""
    alone = [one for one in rows if one.in_flight == 1 and not one.again and one.side]
    lost = [one for one in alone if one.more_ms > 0]
    larger = [one.side for one in alone if one.side > max((each.side for each in lost), default=0)]
    if larger:
        return f"the split is faster from pictures of {min(larger)}² on"
    least, most = min(one.more_ms for one in lost), max(one.more_ms for one in lost)
    return f"the split is not faster on one machine: where it loses, a picture costs {least:.1f} to {most:.1f} ms more"


started_s = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - started_s:6.1f} s  {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.break_even", description="Where the split loses.")
    parser.add_argument("--quick", action="store_true", help="whether everything can be measured, not what it comes to")
    parser.add_argument("--model", type=Path, help=f"folder of a checkpoint (default: a tiny {FAMILY})")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (default: bench/out)")
    options = parser.parse_args(arguments)
    with Stack() as stack:
        both = set_ups(stack, options.model or cached_checkpoint(FAMILY))
        bench = BreakEven(both, 9 if options.quick else 60)
        rows = asyncio.run(measure(bench, SIDES[::2] if options.quick else SIDES, WORDS))
        held = {one.name: sum(each.unique_bytes for each in memory(one.pids()).values()) / MIB for one in both}
    options.out.mkdir(parents=True, exist_ok=True)
    found = {
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "rows": [asdict(one) for one in rows],
        "memory_mib": held,
        "conclusion": conclusion(rows),
    }
    (options.out / "break_even.json").write_text(json.dumps(found, indent=1) + "\n")
    print(*table(rows, held), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
