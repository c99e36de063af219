"""Writes docs/metrics.md from the declarations of producer and shim: `python -m tests.metrics_docs`, or `--check`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from consumer_shim.metrics import DECLARATIONS as SHIM
from producer.metrics import Metrics
from producer.wire.metric import GRPC_CODES, ONE, SECONDS, Allowed, Declaration

PATH = Path(__file__).parents[1] / "docs" / "metrics.md"
_HEAD = f"""\
# Metrics

Made from the declarations in `producer/metrics.py` and `consumer_shim/metrics.py` by `make docs`; a test keeps it true.

The producer serves its own at `--metrics-listen` (port 9464), `/metrics`, beside those of the process (`process_*`,
`python_*`). The shim's are in vLLM's `/metrics`, those of pulls with vLLM's labels `model_name` and `engine` besides.
With several API servers each of them counts what came to it, and vLLM adds them up.

Names are those of a scrape. A histogram has `_bucket`, `_sum` and `_count`; those in seconds have buckets up to
{", ".join(f"{bound:g}" for bound in SECONDS)}. Labels have the values that are listed and no others, so that the number
of series is bounded; none is a content key, an address or anything else that a client sends. A *code* is the name of a
gRPC status: {", ".join(GRPC_CODES)}.
"""
_SECTIONS = {
    "requests": "Requests and items",
    "stage_seconds": "Stages and steps",
    "graph_hits": "Graphs and device memory",
    "pool_bytes": "Pool and leases",
    "pulls": "Pulls",
    "part_up": "The process",
    "shim_pulls": "The shim, in vLLM's `/metrics`",
}
"""By the first metric of each."""
_SUFFIXES = {"counter": "_total", "info": "_info"}
_COLUMNS = "| name | type, unit | labels | what it is | when to look, and what it says |\n|---|---|---|---|---|\n"


def text() -> str:
    """All of docs/metrics.md."""
    declared = [*Metrics.declarations(), *SHIM]
    assert _SECTIONS.keys() <= {one.name for one in declared}, "a section's first metric has another name now"
    return _HEAD + "".join(_rows(declared))


def _rows(declared: list[Declaration]) -> Iterator[str]:
    for one in declared:
        if one.name in _SECTIONS:
            yield f"\n## {_SECTIONS[one.name]}\n\n{_COLUMNS}"
        labels = "; ".join(f"`{name}`: {_values(values)}" for name, values in one.labels.items())
        kind = ", ".join(filter(None, [one.kind, one.unit]))
        yield f"| `{one.full_name}{_SUFFIXES.get(one.kind, '')}` | {kind} | {labels} | {one.meaning} | {one.look} |\n"


def _values(allowed: Allowed) -> str:
    if allowed is ONE:
        return "the process's own"
    if allowed == GRPC_CODES:
        return "a code"
    return "rows of a captured graph" if isinstance(allowed, range) else ", ".join(allowed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where it is not up to date")
    if not parser.parse_args().check:
        PATH.write_text(text())
    elif not PATH.exists() or PATH.read_text() != text():
        print("docs/metrics.md is not what the declarations say: run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
