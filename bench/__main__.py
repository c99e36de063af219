"""`make bench`: the service beside vLLM's own encoder-only instance, on the same pictures, in one run.

    python -m bench [--quick] [--model FOLDER] [--side S] [--in-flight N ...] [--repeats N] [--out FOLDER]

Both serve a tiny model on this machine, so that what is compared is all that is not the model. Both are up throughout;
one is loaded at a time, in turn. Writes `bench.json` and `bench.png`, prints tables, and ends with `BENCH OK` and 0, or
with a line for each target that was missed or thing that failed, `BENCH FAILED` and 1.
"""

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import machine, ours, peer, stages
from bench.images import pictures
from bench.load import LoadError
from bench.measure import Side, closed_samples, open_samples
from bench.memory import Memory, command, memory
from bench.plot import draw
from bench.report import Run, as_json, lines
from bench.results import OURS, PEER
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.leftovers import leftovers, snapshot
from tests.kit.processes import ServiceError
from tests.kit.servers import ENVIRONMENT
from tests.kit.stack import Stack

INTERRUPTED = 130
FAMILY = "qwen2_5_vl"
OUT = Path(__file__).parent / "out"
SEED = 20261130
OURS_SETTINGS: dict[str, object] = {"pool_bytes": 64 << 20}
"""The peer's embeddings lie in files, which are nobody's memory; ours count, and 64 MiB of them are enough."""
PEER_ARGS = "--max-num-seqs 64 --mm-processor-cache-gb 0 --disable-uvicorn-access-log --disable-log-stats"
"""What is good for the peer where no picture comes twice."""
OPEN_RATES = (0.5, 0.8, 1.2, 2.0)
"""Arrivals of the open load, over what the peer did with the most in flight."""
USUAL = {"in_flight": [1, 8, 32], "rounds": 30, "requests": 200, "repeats": 3, "open_s": 4.0, "stage_s": 1.0}
QUICK = {"in_flight": [1, 8], "rounds": 4, "requests": 16, "repeats": 1, "open_s": 0.5, "stage_s": 0.1}

started_s = time.monotonic()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    before = snapshot()
    code, failures = 1, []
    try:
        with Stack() as stack, tempfile.TemporaryDirectory(prefix="ec-bench-", dir=options.saved) as saved:
            run = measure(stack, options, Path(saved))
        write(run, options)
        print(*lines(run), "", sep="\n")
        failures = [] if options.quick else run.missed()
    except KeyboardInterrupt:
        code, failures = INTERRUPTED, ["interrupted"]
    except (ServiceError, LoadError, stages.StagesError) as error:
        failures = [str(error)]
    failures += [f"left behind: {thing}" for thing in leftovers(before)]
    for failure in failures:
        print(f"FAILED: {failure}")
    print("BENCH FAILED" if failures else "BENCH OK")
    return code if failures else 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="The service beside vLLM's own encoder.")
    parser.add_argument("--quick", action="store_true", help="whether everything can be measured, not what it comes to")
    parser.add_argument("--model", type=Path, help=f"folder of a checkpoint (default: a tiny {FAMILY})")
    parser.add_argument("--side", type=int, default=224, help="pixels of a picture's side (default: %(default)s)")
    parser.add_argument("--in-flight", type=int, nargs="+", metavar="N", help="closed loads (default: 1 8 32)")
    parser.add_argument("--requests", type=int, help="fewest requests of a closed load (default: 200)")
    parser.add_argument("--rounds", type=int, help="of a closed load, for each that is in flight (default: 30)")
    parser.add_argument("--repeats", type=int, help="of all closed loads (default: 3)")
    parser.add_argument("--open-s", type=float, help="seconds of each open load (default: 4)")
    parser.add_argument("--stage-s", type=float, help="seconds for each stage alone (default: 1)")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON object of the producer's settings")
    parser.add_argument("--unary", action="store_true", help="a call a picture, not one EncodeStream for all")
    parser.add_argument("--peer-args", default=PEER_ARGS, help="flags of `vllm serve` (default: %(default)s)")
    parser.add_argument("--saved", type=Path, default="/dev/shm", help="where the peer saves (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (default: bench/out)")
    options = parser.parse_args(arguments)
    for name, value in (QUICK if options.quick else USUAL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def measure(stack: Stack, options: argparse.Namespace, saved: Path) -> Run:
    """Starts both servers, one after the other, and measures everything."""
    model, settings, run = options.model or cached_checkpoint(FAMILY), OURS_SETTINGS | options.settings, Run()
    producer = ours.server(model, settings=settings)
    vllm = peer.server(model, saved, extra_args=shlex.split(options.peer_args))
    request, client = (ours.request, ours.client) if options.unary else (ours.stream_request, ours.stream_client)
    sides = [
        Side(name=OURS, server=producer, request=request, client=lambda: client(producer.address)),
        Side(name=PEER, server=vllm, request=peer.request, client=lambda: peer.client(vllm.url)),
    ]
    for side in sides:
        stack.start(side.server)
        stack.wait_ready(say)
        run.ready_after_s[side.name] = side.server.age_s
    asyncio.run(measure_loads(run, sides, options))
    say("measuring each stage alone")
    alone = stages.measure_alone(
        model, side=options.side, seconds=options.stage_s, settings=settings, env=ENVIRONMENT
    )  # fmt: skip
    alone.append(asyncio.run(stages.measure_call(producer.address)))
    run.service = stages.in_service(run.busiest(OURS))
    run.stage_rows = stages.rows(alone, run.service)
    return run


async def measure_loads(run: Run, sides: Sequence[Side], options: argparse.Namespace) -> None:
    """Closed loads in repeats, the memory that they leave, and open loads."""
    images = pictures(SEED, options.side)
    for repeat in range(options.repeats):
        say(f"repeat {repeat + 1} of {options.repeats}: {', '.join(map(str, options.in_flight))} in flight")
        run.closed += await closed_samples(
            sides, images, options.in_flight, repeat=repeat, least=options.requests, rounds=options.rounds
        )
    run.memory = {side.name: memory_of(side) for side in sides}
    peak = statistics.median(one.result.throughput for one in run.busiest(PEER))
    rates = [round(peak * part, 1) for part in OPEN_RATES]
    say(f"arrivals at random moments, {', '.join(map(str, rates))} a second")
    run.opened += await open_samples(sides, images, rates, seconds=options.open_s, seed=SEED)


def memory_of(side: Side) -> dict[str, Memory]:
    """By process."""
    return {f"{command(pid)} {pid}": found for pid, found in memory(side.pids()).items()}


def write(run: Run, options: argparse.Namespace) -> None:
    """The results into their folder."""
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {OURS: OURS_SETTINGS | options.settings, PEER: options.peer_args}
    found = as_json(run, settings, shown_command(options))
    (options.out / "bench.json").write_text(json.dumps(found, indent=1) + "\n")
    title = f"{OURS}: ec-producer; {PEER}: vLLM, encoder only; JPEG of {options.side}² on {machine.cpu_name()}"
    draw(options.out / "bench.png", title, run.closed, run.opened)


def shown_command(options: argparse.Namespace) -> str:
    """What makes the same run elsewhere; of a folder only the name."""
    words = ["python", "-m", "bench", *(["--quick"] if options.quick else [])]
    words += ["--model", options.model.name] if options.model else []
    words += ["--in-flight", *map(str, options.in_flight)]
    for name in ("side", "rounds", "requests", "repeats", "open_s", "stage_s", "peer_args"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    words += ["--unary"] if options.unary else []
    words += ["--settings", json.dumps(options.settings)] if options.settings else []
    return shlex.join(words)


def say(text: str) -> None:
    print(f"{time.monotonic() - started_s:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
