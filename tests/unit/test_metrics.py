"""Metrics: what they measure, and how they are named."""

import pytest

from producer.metrics import Metrics
from tests.unit.conftest import sample


def test_a_stage_is_timed_though_it_fails(metrics: Metrics) -> None:
    with metrics.time("encode"):
        pass
    with pytest.raises(KeyError), metrics.time("encode"):
        raise KeyError
    assert sample(metrics, "stage_seconds_count", stage="encode") == 2
    assert sample(metrics, "stage_seconds_sum", stage="encode") >= 0


def test_the_pool_is_read_at_each_scrape(metrics: Metrics) -> None:
    entries = [1]
    metrics.watch_pool("entries", "Embeddings in the pool.", lambda: len(entries))
    assert sample(metrics, "pool_entries") == 1
    entries.append(2)
    assert sample(metrics, "pool_entries") == 2


def test_a_replay_counts_its_items_its_rows_and_its_graphs(metrics: Metrics) -> None:
    """Of an encoder with two paths, each has a graph of its own."""
    metrics.count_replay(num_items=3, num_rows=50, num_padding_rows=14, budgets=[64])
    metrics.count_replay(num_items=1, num_rows=90, num_padding_rows=38, budgets=[64, 64])
    metrics.count_replay(num_items=1, num_rows=8, num_padding_rows=0, budgets=[8])
    assert sample(metrics, "graph_hits_total") == 5
    assert [sample(metrics, "graph_rows_total", kind=kind) for kind in ("real", "padding")] == [148, 52]
    assert [sample(metrics, "graph_replays_total", budget=budget) for budget in ("64", "8", "16")] == [3, 1, 0]


def test_two_producers_in_one_process_do_not_meet(metrics: Metrics) -> None:
    metrics.non_finite.inc()
    assert sample(Metrics(), "non_finite_outputs_total") == 0


def test_all_have_a_help_text_and_one_prefix(metrics: Metrics) -> None:
    for family in metrics.registry.collect():
        assert family.documentation
        assert family.name.startswith(("ec_producer_", "process_", "python_")), family.name
