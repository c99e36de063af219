"""`python -m tests.fuzz [TARGET ...] --seconds N`: fuzzes each for N seconds from its kept corpus.

It prints runs, coverage and new inputs, and ends with FUZZ OK, or with the input that was a finding and exit status 1.
`--keep` puts inputs that reach new code into the kept corpus, minimised.
"""

import argparse
import sys

from tests.fuzz.runner import fuzz, keep, kept
from tests.fuzz.targets import TARGETS

_SHOWN = 6000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz what reads bytes of others.")
    parser.add_argument("targets", metavar="TARGET", nargs="*", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="put what reaches new code into the corpus")
    options = parser.parse_args()
    unknown = set(options.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    results = [_fuzz(name, options.seconds, is_kept=options.keep) for name in options.targets or TARGETS]
    if all(results):
        print("FUZZ OK")
    return 0 if all(results) else 1


def _fuzz(name: str, seconds: int, *, is_kept: bool) -> bool:
    seeds = [*TARGETS[name].seeds().values(), *(path.read_bytes() for path in kept(name))]
    report = fuzz(name, seconds, seeds)
    print(
        f"{name}: {report.num_runs} runs, coverage {report.seed_coverage} to {report.coverage}, {len(report.new)} new",
        flush=True,
    )
    if is_kept:
        print(f"{name}: {keep(name, report.new)} inputs are kept", flush=True)
    if not report.is_ok:
        print(report.output[-_SHOWN:])
        print(f"{name}: FINDING: {report.finding or 'it did not run to its end'}", flush=True)
        if report.finding is not None:
            print(f"  {report.finding.read_bytes()[:200]!r}")
    return report.is_ok


if __name__ == "__main__":
    sys.exit(main())
