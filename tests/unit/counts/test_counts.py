"""Neither a step nor an item costs more than it did, in counts that need no clock: see `ceilings.toml`."""

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from producer.runner.slot_ring import SlotRing
from tests.kit.counting import counted_calls
from tests.kit.engines import Engine
from tests.unit.conftest import INFO, SHAPE, key_of
from tests.unit.counts import table
from tests.unit.counts.cases import STEP_ITEMS, Steps, measure, new_pool, tiny
from tests.unit.counts.table import Measures

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # torch's, of received bytes
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
]

EACH_MORE = {"launches": 6, "copies": 3, "allocations": 4, "views": 5, "calls": 340}
"""What each further item of a step may cost on the host; on a device the launches are a replayed graph's."""
EACH_MORE_ASKED = {"tasks": 1, "wake-ups": 0, "calls": 500}
"""What each further item of an Encode may."""


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with tiny() as made:
        yield made


@pytest.fixture(scope="module")
def found(one: Engine) -> dict[str, Measures]:
    return measure(one)


@pytest.mark.parametrize("case", table.load())
def test_nothing_costs_more_than_the_table_allows(found: dict[str, Measures], case: str) -> None:
    complaints = table.excess(case, found[case], table.load())
    assert not complaints, "\n".join([*complaints, f"{table.CEILINGS.name} says what to do"])


def test_the_table_has_every_case(found: dict[str, Measures]) -> None:
    known = {case: set(measures) for case, measures in table.load().items()}
    assert known == {case: set(measures) for case, measures in found.items()}


def grown(found: dict[str, Measures], what: str, measure: str) -> float:
    """What each further item costs, from 8 to 16 of them."""
    _, few, many = (found[f"{what} of {number}"][measure].total() for number in STEP_ITEMS)
    return (many - few) / (STEP_ITEMS[2] - STEP_ITEMS[1])


@pytest.mark.parametrize("measure", EACH_MORE)
def test_a_step_costs_little_more_for_each_further_item(found: dict[str, Measures], measure: str) -> None:
    assert grown(found, "step", measure) <= EACH_MORE[measure]


@pytest.mark.parametrize("measure", EACH_MORE_ASKED)
def test_a_call_costs_little_more_for_each_further_item(found: dict[str, Measures], measure: str) -> None:
    assert grown(found, "Encode", measure) <= EACH_MORE_ASKED[measure]


# The guard itself


def test_a_copy_that_is_added_is_found(
    one: Engine, found: dict[str, Measures], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.save(found, tmp_path / "ceilings.toml")
    with new_pool() as pool:
        steps = Steps(one, pool)
        embed = steps.runner._embed
        monkeypatch.setattr(steps.runner, "_embed", lambda kwargs: [one.clone() for one in embed(kwargs)])
        complaints = table.excess("step of 8", steps.count(8), table.load(tmp_path / "ceilings.toml"))
    before = found["step of 8"]["copies"].total()
    assert f"step of 8: {before + 8} copies, at most {before} are allowed. clone: " in "".join(complaints)


def test_what_grew_is_named() -> None:
    before = Counter({"producer/a.py:f": 90, "vllm/b/c.py:g": 100, "asyncio/d.py:h": 10})
    known = {"case": {"calls": {"total": 200, "producer/a.py": 90, "vllm": 100, "python": 10}}}
    assert table.excess("case", {"calls": before}, known) == []
    now = copy.copy(before)
    now["producer/a.py:f"] += 6
    assert table.excess("case", {"calls": now}, known) == []  # within the margin
    now["producer/a.py:more"] += 2
    assert table.excess("case", {"calls": now}, known) == [
        "case: 208 calls, at most 200 are allowed. producer/a.py: 90 -> 98\n"
        "        96 producer/a.py:f\n"
        "         2 producer/a.py:more"
    ]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    counts: Any = {"launches": Counter({"add": 3, "mul": 96, "few": 1})}
    table.save({"step of 1": counts}, tmp_path / "ceilings.toml")
    assert table.load(tmp_path / "ceilings.toml") == {"step of 1": {"launches": {"total": 100, "mul": 96}}}


# What steps and embeddings leave behind: nothing


def test_steps_take_no_slot_memory_once_it_fits(one: Engine) -> None:
    with new_pool() as pool:
        steps = Steps(one, pool)
        slots = steps.runner._ring._slots
        before = [slot._host.data_ptr() for slot in slots]
        for number in (16, 1, 8):
            items = steps.items(number)
            with counted_calls() as calls:
                steps.run(items)
            assert calls.named("acquire").total() >= 1  # a slot was handed out
            assert not calls.named("_allocate")
        assert [slot._host.data_ptr() for slot in slots] == before


def test_a_slot_that_is_too_small_is_seen_to_grow() -> None:
    slot = SlotRing.allocate(2, 1024, torch.device("cpu"))
    with counted_calls() as calls, slot.acquire(4096):
        pass
    assert calls.named("_allocate").total() == 1


def test_steps_leave_no_objects_behind(one: Engine) -> None:
    with new_pool() as pool:
        steps = Steps(one, pool)
        assert left_by(lambda: steps.run(steps.items(8)), times=10) < 1


def test_embeddings_that_push_others_out_leave_no_objects_behind() -> None:
    """Each put evicts, and each lease ends."""
    numbers, rows = iter(range(1 << 30)), memoryview(bytes(SHAPE.payload_bytes))
    with new_pool(64 * 4096) as pool:

        def put_and_lease() -> None:
            key = key_of(next(numbers))
            pool.put(key, INFO, rows)
            pool.release(pool.grant(key).lease_id)

        for _ in range(128):
            put_and_lease()
        assert left_by(put_and_lease, times=1000) < 0.1
        assert pool.store.num_blocks == 64


def left_by(run: Callable[[], None], times: int) -> float:
    """Objects that each `run` leaves, of those that hold others, in a state in which none should be."""
    for _ in range(3):
        run()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(times):
        run()
    gc.collect()
    return (len(gc.get_objects()) - before) / times
