"""The stage table: figures of the metrics, beside those of each stage alone."""

import dataclasses

import pytest

from bench.alone import ENCODE, PREPROCESS, PUBLISH, Alone, measured
from bench.stages import CALL, WAITING, StagesError, in_service, lines, rows, thread_lines
from tests.bench.samples import sample

LOAD = {"in_flight": 32}
ALONE = [
    Alone(stage="decode", num_items=1, ms=0.25, cpu_ms=0.25, num_calls=9),
    Alone(stage=PREPROCESS, num_items=1, ms=1.5, cpu_ms=0.1, num_calls=9),
    *(Alone(stage=ENCODE, num_items=size, ms=2.0 * size, cpu_ms=2.0 * size, num_calls=9) for size in (1, 8, 32)),
    Alone(stage=PUBLISH, num_items=1, ms=0.02, cpu_ms=0.02, num_calls=9),
    Alone(stage=CALL, num_items=1, ms=0.5, cpu_ms=0.2, num_calls=9),
]


def test_stages_in_the_service_are_means_over_items_and_shares_of_the_time() -> None:
    service = in_service([sample("ours", repeat, LOAD, rate=100) for repeat in range(2)])  # 2 s, 200 items, 20 steps
    assert service[PREPROCESS].ms_per_item == pytest.approx(3.0)
    assert service[PREPROCESS].share_of_core == pytest.approx(0.3)
    assert (service[ENCODE].ms_per_item, service[ENCODE].items_per_call) == (pytest.approx(5.0), pytest.approx(10))
    assert service[WAITING].ms_per_item == pytest.approx(20)


def test_metrics_without_an_item_are_an_error() -> None:
    idle = dataclasses.replace(sample("ours", 0, LOAD, rate=100), stages={"items": 0.0, "steps": 0.0})
    with pytest.raises(StagesError, match="count no item"):
        in_service([idle])


def test_a_step_in_the_service_stands_beside_that_of_the_nearest_size() -> None:
    table = rows(ALONE, in_service([sample("ours", 0, LOAD, rate=100)]))
    encodes = {row["items"]: row["service_ms_per_item"] for row in table if row["stage"] == ENCODE}
    assert encodes == {1: None, 8: pytest.approx(5.0), 32: None}
    assert [row["stage"] for row in table] == [one.stage for one in ALONE]
    assert table[0]["service_ms_per_item"] is None
    assert (table[1]["alone_items_per_s"], table[1]["service_share_of_core"]) == (
        pytest.approx(667, abs=1),
        pytest.approx(0.3),
    )


def test_the_table_leaves_blank_what_has_no_measure() -> None:
    service = in_service([sample("ours", 0, LOAD, rate=100)])
    _, _, *body, last = lines(rows(ALONE, service), service)
    assert body[0].split() == ["decode", "0.250", "0.250", "4000"]
    assert body[3].split() == ["encode,", "8", "at", "once", "2.000", "2.000", "500", "5.000", "0.50"]
    assert last == "An item waits for 20.0 ms in queues; a step has 10.0 items."


def test_threads_are_listed_by_what_they_compute() -> None:
    samples = [sample("ours", repeat, LOAD, rate=100) for repeat in range(2)]
    busiest, other = thread_lines(samples)
    assert (busiest.split()[0], other.split()[0]) == ("4.000", "3.000")
    assert [*thread_lines(samples, least_ms=3.5)] == [busiest]


def test_the_first_call_is_not_measured_and_there_are_some() -> None:
    made: list[int] = []
    found = measured("any", 4, ((lambda number=number: made.append(number)) for number in range(6)), seconds=0)
    assert (made, found.num_calls, found.num_items) == ([*range(6)], 5, 4)
