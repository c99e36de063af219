"""Measures all cases and writes `ceilings.toml` anew: `python -m tests.unit.counts`.

On a CPU with AMX, so that vLLM's products are counted in both of their forms, and what is more is the ceiling.
"""

import os
import warnings
from unittest import mock

from tests.unit.counts import table
from tests.unit.counts.cases import measure, tiny

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    before = table.load() if table.CEILINGS.exists() else {}
    with tiny() as one:
        found = measure(one)
    with mock.patch("vllm.model_executor.layers.utils.check_cpu_sgl_kernel", return_value=False), tiny() as one:
        without_amx = measure(one)
    for case, measures in found.items():
        for name, counts in without_amx[case].items():
            measures[name] = max(measures[name], counts, key=lambda counts: counts.total())
    table.save(found)
    for case, measures in found.items():
        for name, counts in measures.items():
            was = before.get(case, {}).get(name, {}).get("total", "-")
            print(f"{case:28} {name:12} {was:>7} -> {counts.total():>7}")
