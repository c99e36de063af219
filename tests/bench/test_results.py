"""Ratios are medians over pairs, and say whether they are what they should be."""

import re

import pytest

from bench.results import CPU_TARGETS, latency_ratio, load_lines, loads, paired, throughput_ratio
from tests.bench.samples import pairs, run, sample

AT_32 = {"in_flight": 32}


def test_a_ratio_is_the_median_of_the_ratios_of_pairs() -> None:
    samples = pairs(AT_32, (300, 100), (100, 100), (80, 20))
    assert throughput_ratio(samples, 32) == pytest.approx(3.0)  # and not the ratio of the medians, which is 1


def test_latencies_are_compared_at_the_load_that_is_asked_for() -> None:
    samples = pairs(AT_32, (300, 100), p50_ms=(90, 100)) + pairs({"in_flight": 1}, (80, 40), p50_ms=(3, 12))
    assert latency_ratio(samples) == pytest.approx(0.25)
    assert latency_ratio(samples, 32) == pytest.approx(0.9)


def test_a_sample_without_its_other_is_no_result() -> None:
    samples = pairs(AT_32, (300, 100), (300, 100))
    with pytest.raises(ValueError, match=re.escape("there are 2 of ours, 1 of peer")):
        paired(samples[:-1], AT_32)
    with pytest.raises(ValueError, match="there are 0 of ours, 0 of peer"):
        throughput_ratio(samples, 8)


def test_pairs_are_of_the_same_repeat_whatever_their_order() -> None:
    samples = pairs(AT_32, (300, 100), (500, 200))
    found = [(ours.result.throughput, peer.result.throughput) for ours, peer in paired(samples[::-1], AT_32)]
    assert found == [(pytest.approx(300), pytest.approx(100)), (pytest.approx(500), pytest.approx(200))]


def test_targets_hold_at_their_bound_and_not_beyond() -> None:
    met = [(target.ratio, target.is_met(target.bound)) for target in CPU_TARGETS]
    assert met == [("throughput_ratio", True), ("latency_ratio", True), ("memory_ratio", True)]
    worse = {"throughput_ratio": 2.49, "latency_ratio": 0.334, "memory_ratio": 0.51}
    for target in CPU_TARGETS:
        assert not target.is_met(worse[target.ratio])
        assert target.line(worse[target.ratio]).endswith("MISSED")
        assert target.line(target.bound).endswith("OK")


def test_the_table_has_a_line_for_each_load() -> None:
    samples = run().closed
    assert loads(samples) == [{"in_flight": 1}, {"in_flight": 32}]
    _, _, one, many = load_lines(samples)
    assert one.split()[:7] == ["1", "in", "flight", "245.0", "69.0", "4.0", "14.0"]
    assert many.split()[:5] == ["32", "in", "flight", "450.0", "150.0"]


def test_cpu_is_that_of_one_request() -> None:
    figures = sample("ours", 0, AT_32, rate=50).figures
    assert (figures["server_cpu_ms"], figures["client_cpu_ms"]) == (pytest.approx(8), pytest.approx(0.5))
    assert (figures["requests"], figures["seconds"]) == (100, 2)
