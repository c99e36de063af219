"""On a GPU: 100,000 different encodes through the real service; memory is flat, and a tenth of them gives equal bytes
a second time.

SOAK_ENCODES is how many; SOAK_FLAGS are further flags of the producer; SOAK_SECONDS ends the first pass, so that there
are figures within a time, and fails where those were too few.
"""

import os
import shlex

import pytest
import torch

from tests.gpu.conftest import Host
from tests.gpu.report import report
from tests.gpu.soak import soak

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ENCODES = int(os.environ.get("SOAK_ENCODES", "100000"))
MAX_S = float(os.environ.get("SOAK_SECONDS", "3600"))
FLAGS = shlex.split(os.environ.get("SOAK_FLAGS", ""))
MAX_RSS_GROWTH_BYTES = 64 << 20
MAX_DEVICE_GROWTH_BYTES = 32 << 20


def test_a_soak_gives_equal_bytes_and_leaves_no_memory_behind(host: Host) -> None:
    found = soak(host, ENCODES, FLAGS, MAX_S)
    report("soak", found)
    assert found["errors"] == 0, found["first_errors"]
    assert (found["encodes"], found["replayed"]) == (ENCODES, ENCODES // 10)
    assert found["shared"] == 0, "what was to be encoded again came from the pool"
    assert found["different_embeddings"] == found["replayed"], "different pictures gave one embedding"
    assert found["differences"] == 0, f"by up to {found['largest_difference']}"
    assert found["rss_growth_bytes"] <= MAX_RSS_GROWTH_BYTES
    assert found["device_growth_bytes"] <= MAX_DEVICE_GROWTH_BYTES
    assert (found["graph_hits"], found["graph_misses"]) == (ENCODES + ENCODES // 10, 0)
