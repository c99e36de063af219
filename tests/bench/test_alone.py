"""The stages alone, of a tiny model, set up as the service sets them up."""

import pytest

from bench.alone import BATCHES, DECODE, ENCODE, PREPROCESS, PROCESS, PUBLISH
from bench.stages import StagesError, measure_alone
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.servers import ENVIRONMENT


@pytest.mark.e2e
def test_every_stage_is_measured() -> None:
    model, settings = cached_checkpoint("qwen2_5_vl"), {"pool_bytes": 1 << 20, "preprocess_workers": 1}
    found = measure_alone(model, side=224, seconds=0.05, settings=settings, env=ENVIRONMENT)
    encodes = [(ENCODE, size) for size in BATCHES]
    assert [(one.stage, one.num_items) for one in found] == [
        *((stage, 1) for stage in (DECODE, PROCESS, PREPROCESS)),
        *encodes,
        (PUBLISH, 1),
    ]
    assert all(one.ms > 0 and one.num_calls >= 5 for one in found)


def test_a_setting_that_is_none_is_said() -> None:
    with pytest.raises(StagesError, match="pool_bytes is 5"):
        measure_alone(cached_checkpoint("qwen2_5_vl"), side=224, seconds=0, settings={"pool_bytes": 5}, env=ENVIRONMENT)
