"""Measures all cases and writes `ceilings.toml` anew: `python -m tests.unit.counts`."""

import os
import warnings

from tests.unit.counts import table
from tests.unit.counts.cases import measure, tiny

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    before = table.load() if table.CEILINGS.exists() else {}
    with tiny() as one:
        found = measure(one)
    table.save(found)
    for case, measures in found.items():
        for name, counts in measures.items():
            was = before.get(case, {}).get(name, {}).get("total", "-")
            print(f"{case:28} {name:12} {was:>7} -> {counts.total():>7}")
