"""Values that the schema takes, made up from the schema itself; Kubernetes' own types from a few samples."""

import json
import string
from typing import Any

from hypothesis import strategies as st

from tests.chart.generate import CHART
from tests.chart.rendering import Values

Schema = dict[str, Any]
SCHEMA: Schema = json.loads((CHART / "values.schema.json").read_text())

_PEER = {"podSelector": {"matchLabels": {"app": "x"}}}
_CONTAINER = {
    "name": "beside",
    "image": "registry.example/beside:1",
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
_SAMPLES: dict[str, list[Any]] = {
    "Affinity": [{"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}}],
    "Container": [_CONTAINER, {**_CONTAINER, "name": "other", "args": ["$(POD_IP)"], "env": [{"name": "POD_IP"}]}],
    "EnvFromSource": [{"secretRef": {"name": "more"}}],
    "EnvVar": [{"name": "A", "value": "1"}, {"name": "HOME", "value": "/x"}, {"name": "POD_IP", "value": "::1"}],
    "HorizontalPodAutoscalerBehavior": [{}, {"scaleUp": {"selectPolicy": "Max"}}],
    "LocalObjectReference": [{"name": "registry"}],
    "MetricSpec": [{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization"}}}],
    "NetworkPolicyEgressRule": [{}, {"to": [_PEER]}],
    "NetworkPolicyPeer": [_PEER, {"ipBlock": {"cidr": "192.0.2.0/24"}}],
    "PodSecurityContext": [{"runAsUser": 7}, {"supplementalGroups": [5]}],
    "ResourceRequirements": [{}, {"limits": {"memory": "64Gi"}}, {"requests": {"cpu": 2}}],
    "SecurityContext": [{"runAsGroup": 9}],
    "Toleration": [{"operator": "Exists"}],
    "TopologySpreadConstraint": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "Volume": [{"name": "more", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
    "VolumeMount": [{"name": "tmp", "mountPath": "/more"}],
}
_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ["$(HOME)", "$$", "yes", "null", "1e3", "0x1", "{{ .Values }}", '"', "'", "a: b", "#", "- x", "\\", "%"]
)
_LABELS = st.dictionaries(st.sampled_from(["a", "team", "x.example/y"]), st.text(string.ascii_letters, max_size=9))
_SIZES = st.builds("{}{}".format, st.integers(1, 900), st.sampled_from(["MiB", "GiB"]))


def made_from(schema: Schema, path: str = "") -> st.SearchStrategy[Any]:
    """Values that `schema` takes; of an object any of its properties."""
    if "$ref" in schema:
        return st.sampled_from(_SAMPLES[schema["$ref"].rpartition("/")[2]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return st.one_of([_of_type(kind, schema, path) for kind in kinds])


def _of_type(kind: str, schema: Schema, path: str) -> st.SearchStrategy[Any]:
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(schema.get("minimum"), schema.get("maximum", 1 << 40))
    if kind == "number":
        return st.floats(schema["minimum"], schema["maximum"], allow_nan=False).filter(lambda x: not 0 < x < 1e-300)
    if kind == "string":
        return _text(schema, path)
    if kind == "array":
        return st.lists(made_from(schema["items"], path), max_size=1 if path == ".extraObjects" else 2)
    if "additionalProperties" in schema and schema["additionalProperties"] is not False:
        return _LABELS
    if "properties" not in schema:
        return (
            st.dictionaries(_TEXTS, _TEXTS | st.integers() | st.booleans(), max_size=2)
            if "kwargs" in path
            else st.just({})
        )
    return st.fixed_dictionaries(
        {}, optional={key: made_from(one, f"{path}.{key}") for key, one in schema["properties"].items()}
    )


def _text(schema: Schema, path: str) -> st.SearchStrategy[str]:
    pattern = schema.get("pattern", "")
    if path.startswith(".extraObjects"):
        return st.just("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}-own}\n")
    if not pattern:
        return _TEXTS.filter(lambda text: len(text) >= schema.get("minLength", 0))
    if "KiB" in pattern:
        return _SIZES
    made = st.from_regex(pattern, fullmatch=True, alphabet=st.characters(codec="ascii", exclude_categories=["Cc"]))
    refused = schema.get("not", {})
    return made.filter(lambda text: text != refused.get("const") and not text.endswith(":latest") and len(text) < 60)


def values() -> st.SearchStrategy[Values]:
    """A few of the chart's values at a time, so that they go together now and then."""
    properties = SCHEMA["properties"]
    return st.lists(st.sampled_from(sorted(properties)), min_size=1, max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: made_from(properties[name], f".{name}") for name in names})
    )
