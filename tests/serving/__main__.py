"""`make contract`: what the service promises at its edges, tried out on the real one.

    python -m tests.serving [--scale X] [--quick] [--only SUITE] [--case NAME]

Ends with a table, a line for each promise that was broken, and `CONTRACT OK` and 0, or `CONTRACT BROKEN` and 1. What
libraries print meanwhile goes to `.cache/logs/contract.log`. Scale 1 takes some ten minutes on two cores.
"""

import argparse
import logging
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from types import FrameType

from tests.kit.leftovers import Snapshot, leftovers, snapshot
from tests.kit.processes import LOGS_DIR, MARK, MARK_VALUE
from tests.kit.stack import Stack
from tests.serving import faults, load, media, pulls
from tests.serving.service import SLACK_S, Service, wait_for
from tests.serving.staged import STAGES
from tests.serving.table import Record, failures, lines, verdict

Case = Callable[[Service, Record, float], None]
CASE_S = 300.0
"""The most that a case may take at scale 1; no more than that long does anything here hang."""
INTERRUPTED = 130


def pull_cases() -> dict[str, Case]:
    """Each fault over each transport; they need no service."""

    def one(fault: Callable[[Record, str, int], None], transport: str, times: int) -> Case:
        return lambda service, record, scale: fault(record, transport, max(len(STAGES), int(times * scale)))

    return {f"{fault.__name__}/{t}": one(fault, t, n) for fault, counts in pulls.FAULTS for t, n in counts.items()}


def by_name(cases: Sequence[Case]) -> dict[str, Case]:
    return {case.__name__: case for case in cases}


SUITES: dict[str, dict[str, Case]] = {
    "pulls": pull_cases(),
    "load": by_name(load.CASES),
    "media": by_name(media.CASES),
    "faults": by_name((*faults.CASES, *faults.RESTARTS)),
}
"""In this order: the last cases end the service."""
QUICK = (
    *("pulls/producer_freezes/grpc", "pulls/consumer_faults/grpc"),
    *("load/overload", "load/many_items", "load/same_item", "load/releases", "load/slow_readers", "load/malformed"),
    *("media/pictures_that_are_odd", "media/pictures_that_are_bad", "media/videos"),
    *("faults/worker_kills", "faults/drain"),
)
"""What the gate has time for: one start of the service, few waits for leases to expire."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.serving", description="The serving contract.")
    parser.add_argument("--scale", type=float, default=1.0, help="how often to try everything")
    parser.add_argument("--quick", action="store_true", help="only the cases that the gate runs")
    parser.add_argument("--only", choices=SUITES, help="one suite")
    parser.add_argument("--case", help="one case of them")
    options = parser.parse_args(arguments)
    chosen = {
        f"{suite}/{name}": case
        for suite, cases in SUITES.items()
        for name, case in cases.items()
        if options.only in (None, suite) and options.case in (None, name)
    }
    if options.quick:
        chosen = {name: case for name, case in chosen.items() if name in QUICK}
    os.environ[MARK] = MARK_VALUE  # on agents that this process starts, too
    hush()
    return report(run_all(chosen, options.scale))


def hush() -> None:
    """Sends the libraries' chatter, of which there is much when a thousand pulls fail, to a file."""
    LOGS_DIR.mkdir(parents=True, exist_ok=True)
    with (LOGS_DIR / "contract.log").open("wb") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    logging.basicConfig()


def run_all(cases: dict[str, Case], scale: float) -> list[Record]:
    """Every case in turn, on one service; then whether anything is left behind."""
    before = snapshot()
    records = []
    with Stack(), closing(Service()) as service:
        for name, case in cases.items():
            records.append(run(name, case, service, scale))
    return [*records, left_behind(before)] if records else []


def run(name: str, case: Case, service: Service, scale: float) -> Record:
    """One case to its end, whatever happens in it."""
    record = Record(name=name)
    started_s = time.monotonic()
    try:
        if not name.startswith("pulls/"):
            service.start()
        signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, CASE_S * max(1.0, scale))
        case(service, record, scale)
    except TimeoutError:
        traceback.print_exc()
        record.hangs("the case itself")
    except Exception as error:
        traceback.print_exc()
        record.expect(False, f"the case itself failed: {error!r}"[:500])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    state = "" if record.is_clean else "  BROKEN"
    print(f"{time.monotonic() - started_s:6.1f} s  {name}{state}", flush=True)
    return record


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def left_behind(before: Snapshot) -> Record:
    """Processes, shared memory and ports that are still there once all has been stopped."""
    record = Record(name="left behind", tried=1, outcomes=Counter(LOOKED=1))
    wait_for(lambda: not leftovers(before), SLACK_S)
    left = leftovers(before)
    record.leaks(len(left), "; ".join(left))
    return record


def report(records: Sequence[Record]) -> int:
    """Prints the table and the verdict; the exit status."""
    print("", *lines(records), "", *failures(records), verdict(records), sep="\n")
    return int(any(failures(records)))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
