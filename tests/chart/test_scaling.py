"""Monitors, rules, dashboard, autoscaling and disruption budget."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.generate import CHART
from tests.chart.rendering import (
    LEAST,
    Manifest,
    Values,
    all_of,
    container,
    of_kind,
    pod,
    render,
    values_of,
    with_least,
    workload,
)

RULES = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]


def spec(kind: str, suffix: str = "", **values: Any) -> Manifest:
    """The spec of one manifest with these values."""
    found: Manifest = of_kind(render(with_least(values)), kind, suffix)["spec"]
    return found


# metrics


@pytest.mark.parametrize(
    ("kind", "key", "ends"),
    [
        ("PodMonitor", "podMonitor", "podMetricsEndpoints"),
        ("ServiceMonitor", "serviceMonitor", "endpoints"),
    ],
)
def test_monitors_scrape_the_metrics_port(kind: str, key: str, ends: str) -> None:
    relabelings = [{"sourceLabels": ["a"], "targetLabel": "b"}]
    values = {"enabled": True, "labels": {"release": "p"}, "interval": "7s", "relabelings": relabelings}
    manifests = render(with_least({"metrics": {key: values}}))
    found = of_kind(manifests, kind)
    assert found["metadata"]["labels"]["release"] == "p"
    (end,) = found["spec"][ends]
    assert (end["port"], end["path"], end["interval"], end["relabelings"]) == ("metrics", "/metrics", "7s", relabelings)
    assert {"name": "metrics", "containerPort": 9464} in container(manifests)["ports"]
    assert end["port"] in [port["name"] for port in of_kind(manifests, "Service", "-headless")["spec"]["ports"]]


def test_nothing_of_other_apis_by_default() -> None:
    assert {one["apiVersion"] for one in render(LEAST)} == {"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1"}


def test_all_rules_of_the_file_are_there() -> None:
    groups = spec("PrometheusRule", metrics={"prometheusRule": {"enabled": True}})["groups"]
    assert [group["name"] for group in groups] == [group["name"] for group in RULES["groups"]]
    assert len(ALERTS) > 5
    for group, source in zip(groups, RULES["groups"], strict=True):
        for rule, wanted in zip(group["rules"], source["rules"], strict=True):
            assert rule == wanted


def test_rules_can_be_labelled_left_out_and_linked() -> None:
    settings = {
        "enabled": True,
        "alertLabels": {"team": "v"},
        "disabled": ALERTS[:2],
        "runbookBase": "https://d.example/",
    }
    groups = spec("PrometheusRule", metrics={"prometheusRule": settings})["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert [rule["alert"] for rule in alerts] == ALERTS[2:]
    assert {rule["labels"]["team"] for rule in alerts} == {"v"}
    assert all(rule["labels"]["severity"] for rule in alerts)
    assert all(rule["annotations"]["runbook_url"].startswith("https://d.example/docs/") for rule in alerts)
    records = [rule for group in groups for rule in group["rules"] if "record" in rule]
    assert not any("team" in rule.get("labels", {}) or "annotations" in rule for rule in records)


def test_the_dashboard_is_the_files() -> None:
    values = {"metrics": {"dashboard": {"enabled": True, "annotations": {"folder": "f"}, "namespace": "grafana"}}}
    found = of_kind(render(with_least(values)), "ConfigMap", "-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"folder": "f"}
    assert found["metadata"]["namespace"] == "grafana"
    assert len(json.dumps(found)) < 1 << 20, "a ConfigMap holds no more than 1 MiB"
    (text,) = found["data"].values()
    assert json.loads(text) == json.loads((CHART / "files" / "dashboard.json").read_text())


# autoscaling


def scaled(kind: str, **more: Any) -> Values:
    return with_least({"autoscaling": {"kind": kind, "queueWaitSeconds": 0.2, "maxReplicas": 6} | more})


def test_an_hpa_scales_by_what_prometheus_records() -> None:
    manifests = render(scaled("hpa", minReplicas=2))
    found = of_kind(manifests, "HorizontalPodAutoscaler")["spec"]
    assert (found["minReplicas"], found["maxReplicas"]) == (2, 6)
    metric = found["metrics"][0]["pods"]
    assert metric["target"] == {"type": "AverageValue", "averageValue": "200m"}
    (rule,) = of_kind(manifests, "PrometheusRule", "-autoscaling")["spec"]["groups"][0]["rules"]
    assert rule["record"] == metric["metric"]["name"]
    assert found["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600
    assert "replicas" not in workload(manifests)["spec"]


def test_an_adapter_with_rules_of_its_own() -> None:
    manifests = render(scaled("hpa", hpa={"metric": "mine", "recordingRule": False}))
    metric = of_kind(manifests, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]
    assert metric == {"name": "mine"}
    assert all_of(manifests, "PrometheusRule") == []


def test_keda_asks_prometheus() -> None:
    keda = {"serverAddress": "http://p:9090", "authenticationRef": "auth", "fallbackReplicas": 3}
    manifests = render(scaled("keda", keda=keda))
    found = of_kind(manifests, "ScaledObject")["spec"]
    (trigger,) = found["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
    assert trigger["metadata"]["threshold"] == "0.2"
    assert trigger["metadata"]["serverAddress"] == "http://p:9090"
    assert trigger["authenticationRef"] == {"name": "auth"}
    assert found["fallback"] == {"failureThreshold": 4, "replicas": 3}
    assert (found["minReplicaCount"], found["maxReplicaCount"]) == (1, 6)
    assert "replicas" not in workload(manifests)["spec"]


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_the_queries_are_of_this_releases_pods_only(kind: str) -> None:
    manifests = render(scaled("keda") | {"workload": {"kind": kind}})
    query = of_kind(manifests, "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    (pattern,) = set(re.findall(r'pod=~"([^"]+)"', query))
    assert 'namespace="serving"' in query
    own = {"Deployment": "demo-ec-producer-6b9f7c5d4-x2x4q", "StatefulSet": "demo-ec-producer-10"}[kind]
    assert re.fullmatch(pattern, own)
    for other in ("demo-ec-producer-consumer-6b9f7c5d4-x2x4q", "demo-ec-producer-test", "xdemo-ec-producer-0"):
        assert not re.fullmatch(pattern, other)


def test_prometheus_reads_the_queries(tmp_path: Path) -> None:
    hpa = of_kind(render(scaled("hpa")), "PrometheusRule", "-autoscaling")["spec"]["groups"]
    query = of_kind(render(scaled("keda")), "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    groups = [*hpa, {"name": "keda", "rules": [{"record": "asked_by_keda", "expr": query}]}]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(_unit_test(hpa[0]["rules"][0]["record"])))
    done = subprocess.run(["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _unit_test(record: str) -> dict[str, Any]:
    """Two pods: one whose items wait 0.1 to 0.3 s, so nine of ten below 0.28, one to which none came."""
    busy, idle = ({"namespace": "serving", "pod": f"demo-ec-producer-6b9f7c5d4-{name}"} for name in ("busy1", "idle1"))

    def series(name: str, labels: dict[str, str], values: str) -> dict[str, str]:
        return {"series": name + "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}", "values": values}

    inputs = [
        series("ec_producer_queue_seconds_bucket", busy | {"le": "0.1"}, "0x20"),
        series("ec_producer_queue_seconds_bucket", busy | {"le": "0.3"}, "0+10x20"),
        series("ec_producer_queue_seconds_bucket", busy | {"le": "+Inf"}, "0+10x20"),
        series("ec_producer_queue_items", busy, "3x20"),
        *(series("ec_producer_queue_seconds_bucket", idle | {"le": le}, "7x20") for le in ("0.1", "+Inf")),
        series("ec_producer_queue_items", idle, "0x20"),
        series("ec_producer_queue_items", {"namespace": "other", "pod": "p"}, "9x20"),
    ]
    labels = {
        name: "{" + ",".join(f'{k}="{v}"' for k, v in pod.items()) + "}" for name, pod in (("b", busy), ("i", idle))
    }
    return {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": inputs,
                "promql_expr_test": [
                    {
                        "expr": f"round({record}, 0.001)",
                        "eval_time": "4m",
                        "exp_samples": [{"labels": labels["b"], "value": 0.28}, {"labels": labels["i"], "value": 0}],
                    },
                    {
                        "expr": "round(asked_by_keda, 0.001)",
                        "eval_time": "4m",
                        "exp_samples": [{"labels": "{}", "value": 0.28}],
                    },
                ],
            }
        ],
    }


# disruptions


def test_a_drain_of_nodes_takes_one_at_a_time() -> None:
    found = spec("PodDisruptionBudget")
    assert found["maxUnavailable"] == 1
    assert "minAvailable" not in found
    assert found["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert found["selector"]["matchLabels"].items() <= pod(render(LEAST))["metadata"]["labels"].items()
    assert spec("PodDisruptionBudget", workload={"replicas": 3}, pdb={"minAvailable": 2}).get("minAvailable") == 2
    assert spec("PodDisruptionBudget", pdb={"maxUnavailable": "50%"})["maxUnavailable"] == "50%"
    assert all_of(render(with_least({"pdb": {"enabled": False}})), "PodDisruptionBudget") == []
    assert values_of("keda")["pdb"]["maxUnavailable"] == "25%"
