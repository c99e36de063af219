"""Values that are refused: each by a sentence that names the value, what it is and what is allowed."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.generate import CHART
from tests.chart.rendering import LEAST, Values, refusal, values_of, with_least

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def closed_objects(path: str, schema: dict[str, Any]) -> Iterator[str]:
    """Where values have keys that the chart or Kubernetes decides, lists left out."""
    for key, one in schema.get("properties", {}).items():
        if "$ref" in one or "properties" in one:
            yield f"{path}.{key}".lstrip(".")
            yield from closed_objects(f"{path}.{key}", one)


def nested(path: str, value: Any) -> Values:
    """A value at a dotted path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    found: Values = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("image.tag", "latest", "'/image/tag'"),
        ("image.digest", "sha256:12", "'/image/digest'"),
        ("image.pullPolicy", "Sometimes", "'/image/pullPolicy'"),
        ("model.source", "ftp", "'/model/source'"),
        ("model.init.image", "registry.example/m:latest", "'/model/init/image'"),
        ("model.init.image", "registry.example/m", "'/model/init/image'"),
        ("model.path", "../secrets/", "'/model/path'"),
        ("config.pool-bites", "4GiB", "additional properties 'pool-bites' not allowed"),
        ("config.pool-bytes", "4GB", "'/config/pool-bytes'"),
        ("config.pool-bytes", 5, "minimum: got 5, want"),
        ("config.max-streams", 0, "minimum: got 0, want 1"),
        ("config.max-streams", 1.5, "'/config/max-streams'"),
        ("config.max-streams", "many", "'/config/max-streams'"),
        ("config.fidelity", "loose", "'/config/fidelity'"),
        ("config.eager", "yes", "'/config/eager'"),
        ("config.listen", "0.0.0.0:1", "additional properties 'listen' not allowed"),
        ("config.mm-processor-kwargs", "{}", "'/config/mm-processor-kwargs'"),
        ("drain.deadlineSeconds", 4000, "maximum: got 4,000, want 3,600"),
        ("ports.grpc", 80, "minimum: got 80, want 1,024"),
        ("service.type", "ExternalName", "'/service/type'"),
        ("tolerations", [{"kee": "x"}], "additional properties 'kee' not allowed"),
        ("resources.limit", {}, "additional properties 'limit' not allowed"),
        ("extraContainers", [{"nam": "x"}], "'/extraContainers/0'"),
        ("affinity.nodeAfinity", {}, "additional properties 'nodeAfinity' not allowed"),
        ("consumer.shim.producer", [], "additional properties 'producer' not allowed"),
        ("consumer.limitMmPerPrompt.image", 1, "maximum: got 1, want 0"),
        ("autoscaling.kind", "vpa", "'/autoscaling/kind'"),
        ("hugepages.size", "4Mi", "'/hugepages/size'"),
    ],
)
def test_the_schema_refuses(path: str, value: Any, said: str) -> None:
    assert said in refusal(with_least(nested(path, value)))


@pytest.mark.parametrize("path", ["", *closed_objects("", SCHEMA)])
def test_unknown_keys_are_refused_at_every_level(path: str) -> None:
    key = f"{path}.strange".lstrip(".")
    said = refusal(with_least(nested(key, "x")))
    assert f"'/{path.replace('.', '/')}'".replace("'/'", "''") in said
    assert "additional properties 'strange' not allowed" in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image": {"repository": ""}}, r"image\.repository is empty"),
        ({"model": {"name": ""}}, r"model\.name is empty"),
        ({"model": {"source": "pvc"}}, r"model\.name is \"some/model\"; with model\.source 'pvc'"),
        ({"model": {"source": "pvc", "name": ""}}, r"model\.pvc\.claim is empty"),
        ({"model": {"source": "init", "name": ""}}, r"model\.init\.image is empty"),
        ({"tls": {"enabled": True}}, r"tls\.secret is empty"),
        ({"tls": {"clientCaSecret": "ca"}}, r"tls\.clientCaSecret is \"ca\"; it needs tls\.enabled"),
        ({"metrics": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}}, "scraped twice"),
        ({"ports": {"grpc": 9464}}, r"ports\.grpc and ports\.metrics are both 9464"),
        (
            {"transports": {"nixl": {"enabled": True, "ports": {"first": 50000, "last": 50100}}}},
            r"transports\.nixl\.ports are 50000 to 50100; ports\.grpc is among them",
        ),
        (
            {"transports": {"mooncake": {"enabled": True, "ports": {"first": 15000, "last": 15008}}}},
            r"transports\.mooncake\.ports are 15000 to 15008; at least 10",
        ),
        (
            {"transports": {"nixl": {"enabled": True, "ports": {"first": 16000, "last": 16100}},
                            "mooncake": {"enabled": True}}},
            r"transports\.mooncake\.ports are 15000 to 17000; transports\.nixl\.ports is among them",
        ),
        ({"config": {"compile-mm-encoder": True, "fidelity": "exact"}}, r"config\.compile-mm-encoder is true"),
        ({"config": {"pool-bytes": "1KiB"}}, r"pool-bytes is \"1KiB\"; allowed are 1048576 to 70368744177664 bytes"),
        ({"config": {"max-item-bytes": "2 GiB"}}, r"config\.max-item-bytes is \"2 GiB\"; allowed are 1 to 1073741824"),
        ({"config": {"slots": 1}}, r"config\.slots is 1; allowed are 0 and 2 or more"),
        ({"config": {"max-client-items": 5}}, r"config\.max-client-items is 5; allowed are 0 and .*64, or more"),
        ({"probes": {"liveness": {"afterSeconds": 60}}}, r"afterSeconds is 60; it must be more than .*60"),
        ({"rdma": {"ipcLock": True}}, r"rdma\.ipcLock is true; it needs rdma\.enabled"),
        ({"transports": {"mooncake": {"enabled": True, "protocol": "rdma"}}}, r"'rdma'; it needs rdma\.enabled"),
        ({"config": {"pool-bytes": "20GiB"}}, r"limits\.memory is 20Gi; .* alone are 21\.0 GiB"),
        ({"resources": {"limits": {"memory": "4500M"}}}, r"limits\.memory is 4500M; .* alone are 5\.0 GiB"),
        (
            {"resources": {"limits": None, "requests": None}, "hugepages": {"size": "2Mi"}},
            r"hugepages\.size is \"2Mi\"; Kubernetes wants",
        ),
        ({"autoscaling": {"kind": "hpa", "minReplicas": 5}}, r"minReplicas is 5; allowed are 1 to .*4"),
        ({"pdb": {"minAvailable": 1}}, r"pdb\.minAvailable is 1 of 1 replicas; no node"),
        ({"pdb": {"minAvailable": "100%"}}, r"pdb\.minAvailable is 100%"),
        ({"pdb": {"maxUnavailable": 0}}, r"pdb\.maxUnavailable is \"0\"; no node"),
        ({"workload": {"maxUnavailable": 0}}, r"maxSurge and workload\.maxUnavailable are both 0"),
        ({"extraArgs": ["--pool-bytes=1GiB"]}, r"extraArgs has --pool-bytes, which is set already"),
        ({"extraEnv": [{"name": "A"}, {"name": "A"}]}, r"extraEnv has A twice"),
        ({"extraVolumes": [{"name": "shm", "emptyDir": {}}]}, r"extraVolumes has shm, a name that is taken"),
        ({"extraVolumeMounts": [{"name": "no", "mountPath": "/x"}]}, r"extraVolumeMounts has no, which is no volume"),
        ({"model": {"mountPath": "/tmp"}}, r"/tmp is where two volumes are mounted: tmp and model"),
        ({"extraContainers": [{"name": "producer"}]}, r"extraContainers has producer, a name that is taken"),
        ({"consumer": {"enabled": True}, "workload": {"replicas": 2}}, r"workload\.kind is 'Deployment' with up to 2"),
        (
            {"consumer": {"enabled": True}, "tls": {"enabled": True, "secret": "s", "clientCaSecret": "c"}},
            r"(?s)consumer\.tlsCaSecret is empty.*consumer\.tlsSecret is empty",
        ),
        ({"consumer": {"enabled": True}, "tokens": {"secret": "s"}}, r"consumer\.tokenSecret is empty"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(values: Values, said: str) -> None:
    assert re.search(said, refusal(with_least(values)))


def test_all_findings_come_at_once() -> None:
    said = refusal({"rdma": {"ipcLock": True}})
    assert [name in said for name in ("image.repository", "model.name", "rdma.ipcLock")] == [True] * 3


def test_what_goes_together_is_not_refused() -> None:
    for values in (LEAST, values_of("everything")):
        assert refusal(values) == ""
