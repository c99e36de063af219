"""Metrics: what they measure, and how they are named."""

import sys

import pytest
from prometheus_client import Counter, generate_latest

from producer import __version__
from producer.metrics import Metrics
from producer.wire.contract import WIRE_VERSION
from producer.wire.metric import ONE, Declaration
from tests.kit.samples import strangers
from tests.unit.conftest import sample


def test_a_stage_is_timed_though_it_fails(metrics: Metrics) -> None:
    with metrics.time("encode"):
        pass
    with pytest.raises(KeyError), metrics.time("encode"):
        raise KeyError
    assert sample(metrics, "stage_seconds_count", stage="encode") == 2
    assert sample(metrics, "stage_seconds_sum", stage="encode") >= 0


def test_what_others_keep_is_read_at_each_scrape(metrics: Metrics) -> None:
    entries = [1]
    metrics.pool_entries.set_function(lambda: len(entries))
    metrics.pool_evictions.set_function(lambda: 10 * len(entries))
    for number in (1, 2):
        assert (sample(metrics, "pool_entries"), sample(metrics, "pool_evictions_total")) == (number, 10 * number)
        entries.append(2)


def test_a_replay_counts_its_items_its_rows_and_its_graphs(metrics: Metrics) -> None:
    """Of an encoder with two paths, each has a graph of its own."""
    metrics.count_replay(num_items=3, graphs=[(64, 50)])
    metrics.count_replay(num_items=1, graphs=[(64, 60), (64, 30)])
    metrics.count_replay(num_items=1, graphs=[(8, 8)])
    assert sample(metrics, "graph_hits_total") == 5
    assert [sample(metrics, "graph_replays_total", budget=budget) for budget in ("64", "8", "16")] == [3, 1, 0]
    rows = {
        budget: [sample(metrics, "graph_rows_total", budget=budget, kind=kind) for kind in ("real", "padding")]
        for budget in ("64", "8")
    }
    assert rows == {"64": [140, 52], "8": [8, 0]}


def test_two_producers_in_one_process_do_not_meet(metrics: Metrics) -> None:
    metrics.non_finite_outputs.inc()
    assert sample(Metrics(), "non_finite_outputs_total") == 0


def test_all_have_a_help_text_and_one_prefix(metrics: Metrics) -> None:
    for family in metrics.registry.collect():
        assert family.documentation
        assert family.name.startswith(("ec_producer_", "process_", "python_")), family.name


def test_all_that_is_declared_is_there_under_its_name(metrics: Metrics) -> None:
    found = {family.name: family.type for family in metrics.registry.collect()}
    declared = Metrics.declarations()
    assert {one.full_name: found[one.full_name] for one in declared} == {one.full_name: one.kind for one in declared}
    assert all(getattr(metrics, one.name) is not getattr(Metrics, one.name) for one in declared)
    assert strangers(metrics.registry.collect(), declared) == []


def test_counters_of_few_series_have_them_from_the_start(metrics: Metrics) -> None:
    """An increase from nothing to one is none to Prometheus."""
    assert metrics.registry.get_sample_value("ec_producer_items_total", {"code": "INTERNAL"}) == 0
    assert metrics.registry.get_sample_value("ec_producer_pull_failures_total", {"transport": "nixl"}) == 0
    assert metrics.registry.get_sample_value("ec_producer_graph_replays_total", {"budget": "1"}) is None


def test_the_build_says_who_runs(metrics: Metrics) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    labels = {"version": __version__, "wire_version": str(WIRE_VERSION), "python": python}
    assert metrics.registry.get_sample_value("ec_producer_build_info", labels) == 1


def test_there_is_no_second_family_of_times_of_creation(metrics: Metrics) -> None:
    assert b"_created" not in generate_latest(metrics.registry)


# Declarations


LABELS = {"code": ("OK", "LOST"), "budget": range(1, 9)}
DECLARED = Declaration(name="calls", kind="counter", unit="calls", meaning="Calls.", look="Never.", labels=LABELS)


@pytest.mark.parametrize(
    ("label", "value", "allowed"),
    [
        ("code", "OK", True),
        ("code", "ok", False),
        ("code", "", False),
        ("budget", "8", True),
        ("budget", "9", False),
        ("budget", "0", False),
        ("budget", "-1", False),
        ("budget", "one", False),
        ("client", "OK", False),
    ],
)
def test_a_label_has_the_values_that_are_declared(label: str, value: str, allowed: bool) -> None:
    assert DECLARED.allows(label, value) == allowed


def test_an_info_tells_what_its_process_has() -> None:
    info = Declaration(name="build", kind="info", unit="", meaning="It.", look="Once.", labels={"version": ONE})
    assert info.allows("version", "anything")
    assert not info.allows("python", "3")


def test_the_number_of_series_is_known() -> None:
    assert DECLARED.num_series == 16


def test_strangers_are_found(metrics: Metrics) -> None:
    Counter("ec_producer_secret", "It is not declared.", registry=metrics.registry).inc()
    metrics.items.labels("a key").inc()
    metrics.graph_rows.labels("0", "real").inc()
    assert strangers(metrics.registry.collect(), Metrics.declarations()) == [
        ("ec_producer_items_total", {"code": "a key"}),
        ("ec_producer_graph_rows_total", {"budget": "0", "kind": "real"}),
        ("ec_producer_secret_total", {}),
    ]
