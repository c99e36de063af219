"""What `make observe` finds wrong. Prometheus' answers are written down here; it computes none."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.observe import __main__ as observe
from tests.observe.prometheus import QueryError, Series
from tests.observe.queries import Query, Selector, dashboard_queries, grouping, rule_queries, selectors


class Answers:
    """In the place of `Prometheus`: values of queries, and what its rules do."""

    def __init__(self, values: Mapping[str, Sequence[float]], rules: Sequence[dict[str, Any]] = (), **labels: str):
        self._values = values
        self._rules = rules
        self._labels = labels

    def query(self, expr: str) -> list[Series]:
        if expr not in self._values:
            raise QueryError(f"parse error: {expr}")
        return [Series(self._labels, [(0.0, value)]) for value in self._values[expr]]

    def rules(self) -> Sequence[dict[str, Any]]:
        return self._rules


def wrong(values: Mapping[str, Sequence[float]], expr: str, kind: str = "panel", **labels: str) -> list[str]:
    answers = Answers(values, **labels)
    return list(observe.answers(answers, Query("here", expr, kind), ".*"))  # type: ignore[arg-type]


def test_an_answer_is_fine() -> None:
    assert wrong({"up": [1.0]}, "up") == []


@pytest.mark.parametrize("values", [[], [float("nan")]])
def test_no_answer_is_wrong_and_no_number_is_none(values: list[float]) -> None:
    assert wrong({"up": values}, "up") == ["no answer to up"]


def test_a_query_that_prometheus_refuses_is_wrong() -> None:
    assert wrong({}, "sum(up") == ["parse error: sum(up"]


def test_only_what_is_listed_may_be_empty() -> None:
    assert wrong({"sum(ec_producer_device_bytes)": []}, "sum(ec_producer_device_bytes)") == []
    assert wrong({"sum(ec_producer_queue_bytes)": []}, "sum(ec_producer_queue_bytes)") != []


def test_a_value_of_a_label_that_is_not_declared_is_wrong() -> None:
    expr = "sum by (method) (ec_producer_requests_total)"
    assert wrong({expr: [1.0]}, expr, method="Encode", instance="any") == []
    assert wrong({expr: [1.0]}, expr, method="/Encode") == ["method is '/Encode', which is not declared"]


def test_an_alert_may_be_quiet_but_what_it_looks_at_is_there() -> None:
    assert wrong({"up == 0": [], "up": [1.0]}, "up == 0", "alert") == []
    assert wrong({"up == 0": [], "up": []}, "up == 0", "alert") == ["no answer to up"]


def test_rules_that_fail_fire_or_record_nothing_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "SETTLE_S", 0)
    fine = {"name": "fine", "type": "recording", "health": "ok"}
    alert = {"name": "Alert", "type": "alerting", "health": "ok", "state": "pending", "alerts": []}
    empty, broken, firing = fine | {"name": "empty"}, alert | {"health": "err", "lastError": "why"}, dict(alert)
    firing["state"] = "firing"
    answers = Answers({"fine": [1.0], "empty": []}, [fine, alert, empty, broken, firing])
    found = list(observe.rules_at_work(answers))  # type: ignore[arg-type]
    assert found == ["empty records nothing", "Alert is err: why", "Alert fires: []"]


def test_what_a_query_names() -> None:
    expr = 'sum by (le, code) (rate(a_bucket{code=~"x|y", instance="i"}[5m])) / on (job) b:c{} > 0.5 and d unless e'
    assert selectors(expr) == [
        Selector("a_bucket", (("code", "=~", "x|y"), ("instance", "=", "i"))),
        Selector("b:c"),
        Selector("d"),
        Selector("e"),
    ]
    assert grouping(expr) == {"le", "code", "job"}
    with pytest.raises(ValueError, match="matchers are"):
        selectors("a{code=x}")


def test_all_queries_are_found_in_the_files() -> None:
    kinds = [query.kind for query in (*dashboard_queries(), *rule_queries())]
    assert {kind: kinds.count(kind) > 1 for kind in kinds} == dict.fromkeys(
        ("panel", "variable", "record", "alert"), True
    )
