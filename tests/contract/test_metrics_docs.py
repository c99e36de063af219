"""docs/metrics.md is what the declarations say, and the declarations bound every label."""

import re

import pytest

from consumer_shim.metrics import DECLARATIONS as SHIM
from producer.metrics import Metrics
from producer.wire.metric import ONE, SECONDS, Declaration
from tests import metrics_docs

DECLARED = [*Metrics.declarations(), *SHIM]
UNITS = {"seconds": "_seconds", "bytes": "_bytes"}
MOST_VALUES = 32
"""Of a label but `budget`, whose values are the graphs that were captured."""


def test_the_docs_are_up_to_date() -> None:
    assert metrics_docs.PATH.read_text() == metrics_docs.text(), "run `make docs`"


@pytest.mark.parametrize("declared", DECLARED, ids=lambda one: one.name)
def test_a_declaration_is_whole(declared: Declaration) -> None:
    assert re.fullmatch("[a-z][a-z0-9_]*", declared.name)
    assert declared.kind == "info" or declared.unit
    assert declared.unit not in UNITS or declared.name.endswith(UNITS[declared.unit])
    assert not declared.name.endswith(("_total", "_info"))  # a scrape adds those
    for sentence in (declared.meaning, declared.look):
        assert re.fullmatch(r"[^\n|]+[.)]", sentence), sentence


@pytest.mark.parametrize("declared", DECLARED, ids=lambda one: one.name)
def test_every_label_has_a_finite_set_of_values(declared: Declaration) -> None:
    for label, allowed in declared.labels.items():
        if label == "budget":
            assert isinstance(allowed, range)
        elif declared.kind == "info":
            assert allowed is ONE
        else:
            assert allowed is not ONE
            assert 2 <= len(set(allowed)) == len(allowed) <= MOST_VALUES
        assert not set(label.split("_")) & {"key", "address", "client", "host", "request", "lease", "epoch"}


@pytest.mark.parametrize("declared", [one for one in DECLARED if one.kind == "histogram"], ids=lambda one: one.name)
def test_buckets_fit(declared: Declaration) -> None:
    assert list(declared.buckets) == sorted(set(declared.buckets))
    if declared.unit == "seconds":
        assert declared.buckets == SECONDS
        assert (SECONDS[0], SECONDS[-1]) == (0.0005, 60)


def test_a_name_is_declared_once() -> None:
    assert len({one.name for one in DECLARED}) == len(DECLARED)
