"""The stage table: what each stage of the producer could do alone, and what it does in the service.

Alone it is measured in a process of its own (`bench.alone`); in the service by the service's own metrics, under a load.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import ours
from bench.alone import ENCODE, PREPROCESS, PUBLISH, Alone
from bench.load import closed
from bench.measure import Sample

CALL, WAITING = "gRPC call", "waiting"
ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300.0
NUM_CALLS = 500


class StagesError(Exception):
    """The stages could not be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InService:
    """A stage under load."""

    ms_per_item: float
    share_of_core: float
    """How much of the time it was at work, where it has a thread or a process; the sum, where it has several."""
    items_per_call: float = 1.0


def measure_alone(
    model: Path, *, side: int, seconds: float, settings: Mapping[str, object], env: Mapping[str, str]
) -> list[Alone]:
    """Each stage, for so many seconds, of a producer with these settings.

    Raises:
        StagesError: that process failed.
    """
    command = [sys.executable, "-m", "bench.alone", str(model), "--side", str(side), "--seconds", str(seconds)]
    command += ["--settings", json.dumps(settings)]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise StagesError(f"the stages were not measured in {TIMEOUT_S:.0f} s") from None
    if ended.returncode:
        raise StagesError(f"the stages were not measured: {ended.stderr[-1500:]}")
    return [Alone(**one) for one in json.loads(ended.stdout.splitlines()[-1])]


async def measure_call(address: str) -> Alone:
    """A call that makes the service do next to nothing, one after the other."""
    async with ours.trivial_client(address) as send:
        await closed(send, [ours.trivial_request()] * 20, 1)
        result = await closed(send, [ours.trivial_request()] * NUM_CALLS, 1)
    cpu_ms = result.client_cpu_s / NUM_CALLS * 1000
    return Alone(stage=CALL, num_items=1, ms=result.p50_s * 1000, cpu_ms=cpu_ms, num_calls=NUM_CALLS)


def in_service(samples: Sequence[Sample]) -> dict[str, InService]:
    """What the metrics say of our side under these loads, by stage.

    Raises:
        StagesError: they count no item.
    """
    totals = {name: sum(one.stages[name] for one in samples) for name in samples[0].stages}
    seconds = sum(one.result.seconds for one in samples)
    if not totals.get("items") or not totals["steps"]:
        raise StagesError("the producer's metrics count no item in any encoder step; there was a load")
    items, per_step = totals["items"], totals["items"] / totals["steps"]
    return {
        stage: InService(
            ms_per_item=totals[stage] / items * 1000,
            share_of_core=totals[stage] / seconds,
            items_per_call=per_step if stage == ENCODE else 1.0,
        )
        for stage in (PREPROCESS, ENCODE, PUBLISH, WAITING)
    }


def rows(alone: Sequence[Alone], service: Mapping[str, InService]) -> list[dict[str, object]]:
    """The table; a step in the service stands beside that of the nearest size, and what has no measure is None."""
    size = service[ENCODE].items_per_call
    nearest = min((one.num_items for one in alone if one.stage == ENCODE), key=lambda items: abs(items - size))
    found: list[dict[str, object]] = []
    for one in alone:
        there = service.get(one.stage) if one.stage != ENCODE or one.num_items == nearest else None
        found.append(
            {
                "stage": one.stage,
                "items": one.num_items,
                "alone_ms_per_item": one.ms_per_item,
                "alone_cpu_ms_per_item": one.cpu_ms / one.num_items,
                "alone_items_per_s": 1000 / one.ms_per_item,
                "service_ms_per_item": there and there.ms_per_item,
                "service_share_of_core": there and there.share_of_core,
            }
        )
    return found


def lines(table: Sequence[Mapping[str, object]], service: Mapping[str, InService]) -> Iterator[str]:
    """The table as text."""
    yield f"{'':22}  {'alone':^29}  {'in the service':^18}"
    yield f"{'stage':22}  {'ms/item':>9} {'CPU, ms':>9} {'items/s':>9}  {'ms/item':>9} {'of a core':>9}"
    for row in table:
        cells = [row[name] for name in row if name not in ("stage", "items")]
        name = f"{row['stage']}, {row['items']} at once" if row["stage"] == ENCODE else str(row["stage"])
        formats = ("9.3f", "9.3f", "9.0f", "9.3f", "9.2f")
        texts = [
            f"{cell:{form}}" if isinstance(cell, float) else " " * 9 for cell, form in zip(cells, formats, strict=True)
        ]
        yield f"{name:22}  {' '.join(texts[:3])}  {' '.join(texts[3:])}"
    waiting, steps = service[WAITING], service[ENCODE]
    yield f"An item waits for {waiting.ms_per_item:.1f} ms in queues; a step has {steps.items_per_call:.1f} items."


def thread_lines(samples: Sequence[Sample], least_ms: float = 0.05) -> Iterator[str]:
    """What each thread of the service computes for an item, the busiest first."""
    for name, ms in thread_ms(samples).items():
        if ms >= least_ms:
            yield f"{ms:9.3f}  {name}"


def thread_ms(samples: Sequence[Sample]) -> dict[str, float]:
    """By thread, what it computes for an item, in descending order."""
    requests = sum(one.result.num_requests for one in samples)
    names = {name for one in samples for name in one.threads_cpu_s}
    found = {name: sum(one.threads_cpu_s.get(name, 0.0) for one in samples) / requests * 1000 for name in names}
    return dict(sorted(found.items(), key=lambda one: -one[1]))
