"""The check of manifests itself: it refuses what Kubernetes would."""

from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from tests.chart.kubernetes import NEWEST, OLDEST, definitions, trouble
from tests.chart.rendering import LEAST, of_kind, render, values_of

RULE = "monitoring.coreos.com/v1"


def bad(kind: str, case: str, path: str, value: Any) -> str:
    """What is said of a case's manifest with `value` at a dotted path."""
    manifest = of_kind(render(values_of(case)), kind)
    place: Any = manifest
    *above, last = path.split(".")
    for key in above:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value
    return trouble(manifest, OLDEST)


@pytest.mark.parametrize(
    ("kind", "case", "path", "value", "said"),
    [
        ("Service", "tls", "spec.colour", "red", "colour"),
        ("StatefulSet", "everything", "spec.template.spec.containers.0.readynessProbe", {}, "readynessProbe"),
        ("StatefulSet", "everything", "spec.replicas", "two", "spec.replicas"),
        ("PodMonitor", "single-gpu", "spec.podMetricsEndpoints.0.prot", "metrics", "prot"),
        ("PodMonitor", "single-gpu", "spec.podMetricsEndpoints", [], "podMetricsEndpoints"),
        ("ServiceMonitor", "everything", "spec.endpoints.0.interval", "soon", "interval"),
        ("PrometheusRule", "single-gpu", "spec.groups.0.rules", [{"expr": "1"}], "rules.0"),
        ("ScaledObject", "keda", "spec.triggers.0.metadata.threshold", 0.25, "threshold"),
    ],
)
def test_what_is_wrong_is_named(kind: str, case: str, path: str, value: Any, said: str) -> None:
    assert said in bad(kind, case, path, value)


def test_a_kind_that_is_not_there() -> None:
    assert "no Widget" in trouble({"apiVersion": "v1", "kind": "Widget"}, NEWEST)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_package_says_the_same(version: str) -> None:
    for manifest in render(LEAST):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_definitions_are_closed_and_have_no_prose() -> None:
    found = definitions(["Container"])
    assert "SecurityContext" in found
    assert all(one.get("additionalProperties") is False for one in found.values() if "properties" in one)
    assert not any("description" in one for one in found.values())
