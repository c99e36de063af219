"""Each stage of the producer alone, in a process of its own: what it could do if nothing else ran.

    python -m bench.alone MODEL [--side S] [--seconds S] [--settings JSON]

Prints one JSON object: by stage, the median of what it takes for one call, of how many items that is, and of what this
process (not those that it started) computed in it. Run it while nothing else runs.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import count, cycle, islice, takewhile
from typing import TYPE_CHECKING, Any

from bench.images import pictures

if TYPE_CHECKING:
    from producer.config import ServeConfig
    from producer.core import MediaItem, PreparedItem
    from producer.preprocess import Preprocessor
    from producer.runner.engine import EngineSettings
    from producer.runner.steps import StepRunner

DECODE, PROCESS, PREPROCESS, ENCODE, PUBLISH = "decode", "vLLM's processor", "preprocess", "encode", "publish"
BATCHES = (1, 4, 8, 16, 32)
"""Of encoder steps, in items."""
IN_FLIGHT = 32
NUM_PICTURES = 64
SEED = 7
PLACE = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}
"""Where it would listen: nowhere that another needs."""
LEAST_CALLS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A stage that has the machine for itself."""

    stage: str
    num_items: int
    """Of one call."""
    ms: float
    """Median time of a call."""
    cpu_ms: float
    """Median of what the calling process computed in it, all its threads together."""
    num_calls: int

    @property
    def ms_per_item(self) -> float:
        return self.ms / self.num_items


def measured(stage: str, num_items: int, calls: Iterable[Callable[[], object]], seconds: float) -> Alone:
    """Makes `calls`, the first of them unmeasured, for so many seconds, but some at least."""
    walls_s: list[float] = []
    cpus_s: list[float] = []
    waiting = iter(calls)
    next(waiting)()
    end_s = time.perf_counter() + seconds
    while len(walls_s) < LEAST_CALLS or time.perf_counter() < end_s:
        call = next(waiting)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        call()
        walls_s.append(time.perf_counter() - began_s)
        cpus_s.append(time.process_time() - began_cpu_s)
    return Alone(
        stage=stage,
        num_items=num_items,
        ms=statistics.median(walls_s) * 1000,
        cpu_ms=statistics.median(cpus_s) * 1000,
        num_calls=len(walls_s),
    )


async def all_stages(config: "ServeConfig", side: int, seconds: float) -> list[Alone]:
    """Every stage in turn, for so many seconds each, set up as the service sets them up."""
    from producer import app
    from producer.core import MediaItem
    from producer.memory.region import SharedRegion
    from producer.metrics import Metrics
    from producer.publisher import Publisher
    from producer.runner.engine import start_engine

    metrics = Metrics()
    items = [MediaItem(modality="image", data=data) for data in islice(pictures(SEED, side), NUM_PICTURES)]
    async with AsyncExitStack() as stack:
        encoder = app._read_model(config)
        region = stack.enter_context(SharedRegion.create("ec-producer-bench", config.pool_bytes))
        preprocessor = app._start_preprocessor(config, encoder, metrics, stack)
        app._load(encoder, region, metrics, stack)
        found = [*pixel_stages(encoder.model_config, items, seconds)]
        prepared = await asyncio.gather(*(preprocessor.prepare("", item) for item in items))
        found.append(await preprocess_stage(preprocessor, items, seconds))
        runner = start_engine(encoder, prepared[:1], engine_settings(config), metrics)
        found += step_stages(runner, prepared, seconds)
        (embedding,) = runner.launch(prepared[:1]).finish()
        publisher = Publisher(app._open_pool(config, region, 1, metrics))
        keyed = (dataclasses.replace(prepared[0], key=f"{number:064x}") for number in count())
        found.append(measured(PUBLISH, 1, (partial(publisher.publish, one, embedding) for one in keyed), seconds))
    return found


def pixel_stages(model_config: Any, items: "Sequence[MediaItem]", seconds: float) -> Iterator[Alone]:
    """vLLM's decoder and processor, on one thread."""
    from producer.decode import Decoder
    from producer.stand_in import Processor

    decoder, processor = Decoder(model_config), Processor(model_config)
    media = [decoder.decode(item) for item in items]
    yield measured(DECODE, 1, (partial(decoder.decode, item) for item in cycle(items)), seconds)
    yield measured(PROCESS, 1, (partial(processor.process, "image", one) for one in cycle(media)), seconds)


async def preprocess_stage(preprocessor: "Preprocessor", items: "Sequence[MediaItem]", seconds: float) -> Alone:
    """All of what comes before the encoder, in the service's own processes, as many at once as keep those busy."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    waiting = takewhile(lambda _: time.perf_counter() < began_s + seconds, cycle(items))
    num_done = 0

    async def client() -> None:
        nonlocal num_done
        for item in waiting:
            await preprocessor.prepare("", item)
            num_done += 1

    await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
    return Alone(
        stage=PREPROCESS,
        num_items=1,
        ms=(time.perf_counter() - began_s) / num_done * 1000,
        cpu_ms=(time.process_time() - began_cpu_s) / num_done * 1000,
        num_calls=num_done,
    )


def step_stages(runner: "StepRunner", prepared: "Sequence[PreparedItem]", seconds: float) -> Iterator[Alone]:
    """Encoder steps of several sizes, of other items each time."""
    for size in BATCHES:
        waiting = cycle(prepared)
        steps = iter(lambda: [*islice(waiting, size)], [])  # noqa: B023  (used up before the next turn)
        yield measured(ENCODE, size, (partial(_step, runner, step) for step in steps), seconds)


def _step(runner: "StepRunner", items: "Sequence[PreparedItem]") -> None:
    from producer.errors import ServiceError

    refused = [one for one in runner.launch(items).finish() if isinstance(one, ServiceError)]
    if refused:
        raise refused[0]


def engine_settings(config: "ServeConfig") -> "EngineSettings":
    from producer.runner.engine import EngineSettings

    return EngineSettings(**{field.name: getattr(config, field.name) for field in dataclasses.fields(EngineSettings)})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.alone", description="Each stage of the producer alone.")
    parser.add_argument("model", metavar="MODEL", help="folder of the model")
    parser.add_argument("--side", type=int, default=224, help="pixels of a picture's side")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each stage")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON object of the producer's settings")
    options = parser.parse_args(arguments)
    from producer.config import ServeConfig

    config = ServeConfig(model=options.model, **PLACE | options.settings)
    found = asyncio.run(all_stages(config, options.side, options.seconds))
    print(json.dumps([dataclasses.asdict(one) for one in found]))


if __name__ == "__main__":
    main()
