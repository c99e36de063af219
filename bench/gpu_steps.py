"""The part `step`: encoder steps of every variant, each in a process of its own, and whether they are right."""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_record import Record
from bench.gpu_servers import GPU_ENVIRONMENT, Place
from bench.gpu_targets import OURS, PEER
from tests.kit.processes import Service, ServiceError
from tests.kit.stack import Stack

REFERENCE_VARIANT, REFERENCE = "f32", "reference.pt"
LOAD_S, MEASURE_S = 150.0, 120.0
POLL_S = 0.05
MAX_ERROR_RATIO = 1.02
"""So many times as far from float32 as vLLM's own eager bfloat16 ours may be: which rounding is nearer is chance."""
OVERHEAD_CASES = ("1x448", "1x896", "1x1036")


def measure_steps(record: Record, place: Place, work: Path, variants: Sequence[str]) -> None:
    """All `variants` load at the same time; then one after the other measures, the reference first.

    Raises:
        ServiceError: one failed, once the others were measured.
    """
    folder = work / "steps"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = [REFERENCE_VARIANT, *variants]
    failures = []
    with Stack() as stack:
        services = {name: _service(place, name, folder) for name in names}
        for service in services.values():
            stack.start(service)
        for name, service in services.items():
            try:
                _measure(record, name, service, folder)
            except ServiceError as error:
                failures.append(f"step {name}: {error}")
    for failure in [*failures, *wrong_steps(record.get("step", {}))]:
        record.add("failures", failure)


def _service(place: Place, name: str, folder: Path) -> Service:
    command = [sys.executable, "-m", "bench.gpu_step", str(place.model), name, str(folder)]
    return Service(
        f"step-{name}",
        command,
        ready=(folder / f"{name}.ready").exists,
        env={**place.host.env, **GPU_ENVIRONMENT, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        cwd=Path(__file__).parents[1],
        logs=place.logs,
        grace_s=2.0,
        start_timeout_s=LOAD_S,
    )


def _measure(record: Record, name: str, service: Service, folder: Path) -> None:
    """Lets one measure, and records each row as it comes.

    Raises:
        ServiceError: it failed, or takes too long.
    """
    since_s = time.monotonic()
    service.wait_ready()
    (folder / f"{name}.go").touch()
    seen, deadline_s = 0, time.monotonic() + MEASURE_S
    while True:
        is_over = not service.running  # asked before the rows are read: none can come after them
        rows = [*_rows(folder / f"{name}.jsonl")]
        for row in rows[seen:]:
            _put(record, name, row)
        seen = len(rows)
        if is_over:
            break
        if time.monotonic() > deadline_s:
            service.kill()
            raise ServiceError(f"not done after {MEASURE_S:.0f} s; {seen} rows came")
        time.sleep(POLL_S)
    ending = service.stop()
    if ending is None or ending.code:
        code = "?" if ending is None else ending.code
        raise ServiceError(f"ended with {code}: {service.log.read_text(errors='replace')[-1500:]}")
    record.put(f"step_seconds/{name}", time.monotonic() - since_s)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines that are there."""
    if path.exists():
        *whole, _ = path.read_text().split("\n")
        yield from map(json.loads, whole)


def _put(record: Record, name: str, row: dict[str, Any]) -> None:
    case = row.pop("case", "settings")
    record.put(f"step/{name}/{case}", row)
    if case in OVERHEAD_CASES and "overhead_ms" in row:
        worst = max(row["overhead_ms"], record.get(f"step/{name}/overhead_ms", row["overhead_ms"]))
        record.put(f"step/{name}/overhead_ms", worst)


def wrong_steps(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with the embeddings of ours: a line each. The tree is that of `step` in the record."""
    ours, peer = steps.get(OURS, {}), steps.get(PEER, {})
    cases = [name for name, found in ours.items() if isinstance(found, Mapping) and "replay_ms" in found]
    failures = [] if cases or OURS not in steps else ["step: there is no case of ours"]
    num_compared = 0
    for case in cases:
        found, other = ours[case], peer.get(case, {}).get("error_of_eager")
        if not found["is_finite"]:
            failures.append(f"step {case}: NaN or infinity in an embedding")
        if not found["is_same_again"]:
            failures.append(f"step {case}: the same step gave another embedding later")
        if found["error"] is None or other is None:
            continue
        num_compared += 1
        if not found["error"] <= MAX_ERROR_RATIO * other:
            failures.append(
                f"step {case}: the error is {found['error']:.5f}, vLLM's own eager {other:.5f};"
                f" allowed is {MAX_ERROR_RATIO:g} times that"
            )
    if cases and not num_compared:
        failures.append("step: no case of ours could be compared with float32 and vLLM's own")
    return failures
