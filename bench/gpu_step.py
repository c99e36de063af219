"""Device time and correctness of encoder steps, of one variant in a process of its own. Needs a GPU.

    python -m bench.gpu_step MODEL VARIANT FOLDER

Loads, writes FOLDER/VARIANT.ready, waits for FOLDER/VARIANT.go, so that several can load at the same time and one
measures alone, and adds a JSON object a line to FOLDER/VARIANT.jsonl: one of what it is, then one a case. The variant
`f32` writes FOLDER/reference.pt instead: what float32 makes of some of the pictures, in the model's own unfused code.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu_step_ours import Float32, Ours
from bench.gpu_step_peer import PEERS, Peer
from bench.gpu_steps import REFERENCE

CASES = ((224, 1), (224, 8), (448, 1), (448, 8), (896, 1), (1036, 1), (1036, 4))
"""Side of a picture in pixels, and how many of them are in a step."""
REFERENCES = {224: 2, 448: 4, 896: 1, 1036: 1}
"""Of how many pictures of each side there is a reference."""
GO_S = 400.0
VARIANTS = ("f32", "ours", *PEERS)


def name_of(side: int, number: int) -> str:
    """Of a case, as figures have it."""
    return f"{number}x{side}"


def wait_for(path: Path, within_s: float) -> None:
    """
    Raises:
        TimeoutError: it is not there in time.
    """
    deadline_s = time.monotonic() + within_s
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path.name} did not come within {within_s:.0f} s")
        time.sleep(0.02)


def run(model: str, variant: str, folder: Path) -> None:
    """Loads, waits and measures."""
    subject = Float32(model) if variant == "f32" else Ours(model) if variant == "ours" else Peer(model, PEERS[variant])
    (folder / f"{variant}.ready").touch()
    wait_for(folder / f"{variant}.go", GO_S)
    if isinstance(subject, Float32):
        subject.write(folder / REFERENCE, REFERENCES)
    else:
        path = folder / REFERENCE
        reference = torch.load(path) if path.exists() else {}
        with (folder / f"{variant}.jsonl").open("a") as rows:
            _say(rows, subject.capture())
            for side, number in CASES:
                _say(rows, {"case": name_of(side, number), **subject.measure(side, number, reference)})
    subject.close()


def _say(rows: Any, found: Mapping[str, object]) -> None:
    rows.write(json.dumps(found) + "\n")
    rows.flush()
    print(json.dumps(found), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_step", description="Encoder steps of one variant.")
    parser.add_argument("model", metavar="MODEL", help="folder of the model")
    parser.add_argument("variant", metavar="VARIANT", choices=VARIANTS, help=f"one of {', '.join(VARIANTS)}")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where it meets its parent")
    options = parser.parse_args(arguments)
    try:
        run(options.model, options.variant, options.folder)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(3)  # a process with a captured graph or a process group may not end otherwise
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
