"""Manifests of all real cases: Kubernetes takes them, and what they point at is there."""

import helm_python as helm
import pytest

from tests.chart.generate import CHART
from tests.chart.invariants import findings, restricted
from tests.chart.rendering import (
    CASES,
    LEAST,
    Values,
    all_of,
    component,
    container,
    name_of,
    notes,
    of_kind,
    pod,
    pods,
    render,
    values_of,
    with_least,
    workload,
)

ROOT_BY_CHOICE = {"everything"}
"""The cases with rdma.ipcLock, which no 'restricted' namespace admits."""


@pytest.fixture(params=CASES, ids=name_of)
def case(request: pytest.FixtureRequest) -> Values:
    return values_of(name_of(request.param))


def test_kubernetes_takes_every_manifest(case: Values) -> None:
    assert list(findings(render(case))) == []


def test_the_fewest_values_are_enough() -> None:
    manifests = render(LEAST)
    assert list(findings(manifests)) == []
    assert workload(manifests)["kind"] == "Deployment"


@pytest.mark.parametrize("release", ["a", "ec-producer", "1234", "r" * 53])
def test_any_release_name_will_do(release: str) -> None:
    values = with_least({"workload": {"kind": "StatefulSet"}, "autoscaling": {"kind": "hpa"}})
    assert list(findings(render(values, release=release))) == []


def test_lint_finds_nothing(case: Values) -> None:
    report = helm.lint(CHART, case, strict=True)
    said = [one for one in report["messages"] if one["error"] != "icon is recommended"]
    assert (said, report["errors"]) == ([], [])


@pytest.mark.parametrize("name", [name_of(case) for case in CASES])
def test_pods_are_restricted(name: str) -> None:
    found = [f"{owner}: {one}" for owner, pod in pods(render(values_of(name))) for one in restricted(pod)]
    if name in ROOT_BY_CHOICE:
        assert {one.rpartition(": ")[2] for one in found} == {
            "container producer runs as root",
            "container producer adds capabilities",
        }
    else:
        assert found == []


def test_the_root_file_system_is_read_only_and_what_is_written_is_a_volume() -> None:
    manifests = render(LEAST)
    assert container(manifests)["securityContext"]["readOnlyRootFilesystem"] is True
    volumes = {one["name"]: one for one in pod(manifests)["spec"]["volumes"]}
    for mount in container(manifests)["volumeMounts"]:
        assert "emptyDir" in volumes[mount["name"]]
    assert {one["mountPath"] for one in container(manifests)["volumeMounts"]} == {
        *("/tmp", "/home/ec-producer", "/dev/shm", "/models")
    }


def test_the_root_user_of_rdma_has_one_capability() -> None:
    context = container(render(with_least({"rdma": {"enabled": True, "ipcLock": True}})))["securityContext"]
    assert context == {
        "runAsUser": 0,
        "runAsNonRoot": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }


def test_the_service_account_has_no_token() -> None:
    manifests = render(LEAST)
    account = of_kind(manifests, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert pod(manifests)["spec"]["serviceAccountName"] == account["metadata"]["name"]
    none = render(with_least({"serviceAccount": {"create": False}}))
    assert all_of(none, "ServiceAccount") == []
    assert pod(none)["spec"]["serviceAccountName"] == "default"


def test_labels_and_annotations_of_all() -> None:
    values = with_least(
        {"commonLabels": {"team": "vision"}, "commonAnnotations": {"a": "b"}, "podLabels": {"tier": "encoder"}}
    )
    manifests = render(values)
    assert {one["metadata"]["labels"]["team"] for one in manifests} == {"vision"}
    assert {one["metadata"]["annotations"]["a"] for one in manifests} == {"b"}
    assert pod(manifests)["metadata"]["labels"]["tier"] == "encoder"
    assert "tier" not in workload(manifests)["spec"]["selector"]["matchLabels"]


def test_labels_cannot_change_what_selectors_want() -> None:
    values = with_least({name: {"app.kubernetes.io/component": "other"} for name in ("commonLabels", "podLabels")})
    assert list(findings(render(values))) == []


def test_digest_and_tag() -> None:
    digest = "sha256:" + "0" * 64
    images = {
        "registry.example/ec-producer:0.1.0": {},
        "registry.example/ec-producer:1": {"tag": "1"},
        f"registry.example/ec-producer@{digest}": {"digest": digest},
        f"registry.example/ec-producer:1@{digest}": {"tag": "1", "digest": digest},
    }
    for image, values in images.items():
        assert container(render(with_least({"image": values})))["image"] == image


def test_the_version_of_chart_and_package_are_one() -> None:
    from producer import __version__

    with helm.Chart.load(CHART) as chart:
        assert (chart.metadata["appVersion"], chart.version) == (__version__, __version__)


def test_objects_of_ones_own() -> None:
    manifests = render(values_of("everything"))
    names = {one["metadata"]["name"] for one in all_of(manifests, "ConfigMap") if not component(one)}
    assert names == {"encoder", "demo-encoder-more"}


def test_notes_name_what_is_open(case: Values) -> None:
    text = notes(case)
    assert "rollout status" in text
    assert ("whoever reaches port" in text) == ("tokens" not in case and not case.get("tls", {}).get("clientCaSecret"))


def test_notes_warn_of_several_replicas_behind_one_name() -> None:
    several = {"workload": {"replicas": 2}}
    assert "set workload.kind to StatefulSet" in notes(with_least(several))
    assert "StatefulSet" not in notes(LEAST)
