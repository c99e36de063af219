"""The service beside its peer on a GPU: encoder steps, service, start and time to first token, and what they are to be.

    python -m bench.gpu --out FOLDER [--parts step,service,start,ttft] [--model FOLDER]

Needs one GPU, vLLM with its kernels, PyTorch and pytest, and these sources, of which nothing needs to be installed. It
makes the model by itself (`bench.real_shape`), writes FOLDER/gpu.json after each figure, and prints the table at the
end. The exit status is 0 if every part ran and all embeddings are right; a missed target is printed and does not change
it. `--rehearse` tries on any machine, with a tiny model, whether all but steps can be measured.
"""

import argparse
import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path

from bench import gpu_service, gpu_ttft, machine
from bench.gpu_record import Record
from bench.gpu_servers import PEERS, Place
from bench.gpu_service import measure_service, measure_start
from bench.gpu_steps import measure_steps
from bench.gpu_targets import OURS, PEER, found, lines
from bench.gpu_ttft import measure_first_tokens
from tests.gpu.conftest import Host
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.timers import raising_after

PARTS = {"step": 170.0, "service": 190.0, "start": 90.0, "ttft": 120.0}
"""Seconds that each may take."""
ALL_S = 525.0
"""Seconds after which no part goes on, so that the file and the table come in time."""
STEPS = (PEER, "peer-best", OURS)
WORK = Path(tempfile.gettempdir()) / "ec-bench-gpu"
LOG_BYTES = 200_000
MODEL_S = 120.0
ROOT = Path(__file__).parents[1]

started_s = time.monotonic()


class TooLongError(BaseException):
    """A part was not done in time. No handler of errors on the way is to take it."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    record = Record(options.out / "gpu.json", head(arguments))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ec-gpu-")))
        saved = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ec-gpu-", dir=options.saved)))
        parts = run_parts(record, options, place_of(options, folder), saved)
        is_right = parts == len(options.parts) and not record.get("failures")
        if not is_right:
            keep_logs(folder / "logs", options.out)
    report(record)
    print("BENCH OK" if is_right else "BENCH FAILED")
    return 0 if is_right else 1


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="The service beside its peer on a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.json, and of logs where something fails")
    parser.add_argument("--parts", type=_names(PARTS), default=[*PARTS], help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--peers", type=_names(PEERS), default=[*PEERS], help=f"of {','.join(PEERS)} (default: all)")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=[*STEPS], help="variants of steps")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint (default: made, with random weights)")
    parser.add_argument("--our-args", type=shlex.split, default=[], help="more flags of `ec-producer serve`")
    parser.add_argument("--best-args", type=shlex.split, default=[], help="more flags of all peers but `peer`")
    parser.add_argument("--saved", type=Path, default="/dev/shm", help="where the peer saves (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=WORK, help="what a later run can use again (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=ALL_S, help="for all parts (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, a tiny model, few requests, no steps")
    options = parser.parse_args(arguments)
    if PEER not in options.peers:
        parser.error(f"argument --peers: {PEER} must be one of them")
    if options.rehearse:
        options.parts = [part for part in options.parts if part != "step"]
    return options


def _names(known: "dict[str, float] | dict[str, tuple[str, ...]]") -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; allowed are {','.join(known)}")
        return names

    return parse


def head(arguments: Sequence[str] | None) -> dict[str, object]:
    """What a run is: command, hardware, versions, date."""
    words = sys.argv[1:] if arguments is None else arguments
    return {
        "command": shlex.join(["python", "-m", "bench.gpu", *words]),
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "failures": [],
    }


def place_of(options: argparse.Namespace, folder: Path) -> Place:
    """With commands in `folder`, and a model, which is made where there is none."""
    commands = folder / "bin"
    commands.mkdir()
    if options.model:
        model = options.model
    elif options.rehearse:
        model = cached_checkpoint("qwen2_5_vl")
    else:
        say("making the model")
        model = made(options.work / "model")
    return Place(
        host=Host.at(commands),
        model=model.resolve(),
        logs=folder / "logs",
        is_gpu=not options.rehearse,
        our_flags=tuple(options.our_args),
        best_flags=tuple(options.best_args),
    )


def made(model: Path) -> Path:
    """The checkpoint, made in a process of its own, which gives its device memory back; it appears whole.

    Raises:
        subprocess.SubprocessError: it failed, or took more than `MODEL_S`.
    """
    if not model.exists():
        draft = model.with_suffix(".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        command = [sys.executable, "-m", "bench.real_shape", str(draft)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=MODEL_S, stdout=subprocess.DEVNULL)
        draft.rename(model)
    return model


def run_parts(record: Record, options: argparse.Namespace, place: Place, saved: Path) -> int:
    """One after the other; how many ran to their end. What went wrong in one is recorded, and the next one runs."""
    loads = gpu_service.REHEARSED if options.rehearse else gpu_service.LOADS
    sides = gpu_ttft.REHEARSED if options.rehearse else gpu_ttft.SIDES
    calls: dict[str, Callable[[], None]] = {
        "step": lambda: measure_steps(record, place, options.work, options.steps),
        "service": lambda: measure_service(record, place, options.work, saved, options.peers, loads),
        "start": lambda: measure_start(record, place, saved),
        "ttft": lambda: measure_first_tokens(record, place, sides),
    }
    num_done = 0
    for part in options.parts:
        left_s = options.seconds - (time.monotonic() - started_s)
        seconds = left_s if options.rehearse else min(PARTS[part], left_s)
        num_done += run_part(record, part, calls[part], seconds)
    return num_done


def run_part(record: Record, part: str, call: Callable[[], None], seconds: float) -> bool:
    """Whether `call` returned within `seconds`; if it did not, why not is recorded."""
    since_s = time.monotonic()
    say(f"{part}, for at most {seconds:.0f} s")
    try:
        with at_most(seconds):
            call()
    except (Exception, TooLongError) as error:  # whatever a part raises, what was measured is to be told
        traceback.print_exc()
        record.add("failures", f"{part}: {type(error).__name__}: {str(error)[-2500:]}")
        return False
    finally:
        record.put(f"part_seconds/{part}", time.monotonic() - since_s)
    return True


def at_most(seconds: float) -> AbstractContextManager[None]:
    """Ends what is in the block, in the main thread, after so many seconds.

    Raises:
        TooLongError: no time is left; in the block, that it was not done by then.
    """
    if seconds <= 0:
        raise TooLongError("no time is left")
    return raising_after(seconds, TooLongError(f"not done after {seconds:.0f} s"))


def keep_logs(logs: Path, out: Path) -> None:
    """The end of each server's log."""
    for log in sorted(logs.glob("*.log")):
        (out / log.name).write_bytes(log.read_bytes()[-LOG_BYTES:])


def report(record: Record) -> None:
    """Writes the table into the record and prints it, the last thing but the verdict."""
    rows = found(record.get, [*(name for name in PEERS if name != PEER), "peer-compiled"])
    record.put("table", [one.as_json() for one in rows])
    for failure in record.get("failures"):
        print(f"FAILED: {failure}")
    print(*lines(rows), sep="\n", flush=True)


def say(text: str) -> None:
    print(f"{time.monotonic() - started_s:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
