"""Schemas of the custom resources that the chart makes, of the fields that it uses; written from their API's reference.

An object that passes has no field that is unknown here and each that the API requires; what a field means is not
checked. The definitions of a cluster's own version decide.
"""

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d))+$"}
_EXPRESSION: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["key", "operator"],
    "properties": {
        "key": _TEXT,
        "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
        "values": {"type": "array", "items": {"type": "string"}},
    },
}


def _closed(required: str = "", **properties: Schema) -> Schema:
    """An object of these properties and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _some(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def _resource(api_version: str, kind: str, spec: Schema) -> dict[str, Schema]:
    metadata = _closed("name", name=_TEXT, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS)
    whole = _closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )
    return {f"{api_version}/{kind}": whole}


_SELECTOR = _closed(matchLabels=_TEXTS, matchExpressions={"type": "array", "items": _EXPRESSION})
RELABELING = _closed(
    sourceLabels={"type": "array", "items": _TEXT},
    separator={"type": "string"},
    targetLabel={"type": "string"},
    regex={"type": "string"},
    modulus={"type": "integer"},
    replacement={"type": "string"},
    action={
        "enum": [
            *("replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep"),
            *("lowercase", "uppercase", "keepequal", "dropequal"),
            *("Replace", "Keep", "Drop", "HashMod", "LabelMap", "LabelDrop", "LabelKeep"),
            *("Lowercase", "Uppercase", "KeepEqual", "DropEqual"),
        ]
    },
)
_ENDPOINT = _closed(
    "port",
    port=_TEXT,
    path=_TEXT,
    scheme={"enum": ["http", "https"]},
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    honorLabels={"type": "boolean"},
    relabelings={"type": "array", "items": RELABELING},
    metricRelabelings={"type": "array", "items": RELABELING},
)
_NAMESPACES = _closed(any={"type": "boolean"}, matchNames={"type": "array", "items": _TEXT})
_RULE: Schema = {
    **_closed(
        "expr",
        alert=_TEXT,
        record={"type": "string", "pattern": "^[a-zA-Z_:][a-zA-Z0-9_:]*$"},
        expr={"anyOf": [_TEXT, {"type": "number"}]},
        keep_firing_for=_DURATION,
        labels=_TEXTS,
        annotations=_TEXTS,
        **{"for": _DURATION},
    ),
    "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
}
_TRIGGER = _closed(
    "type metadata",
    type=_TEXT,
    name=_TEXT,
    metadata=_TEXTS,  # KEDA takes text only
    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
    useCachedMetrics={"type": "boolean"},
    authenticationRef=_closed(
        "name", name=_TEXT, kind={"enum": ["TriggerAuthentication", "ClusterTriggerAuthentication"]}
    ),
)
_HPA_CONFIG = _closed(name=_TEXT, behavior={"type": "object"})
_REPLICAS: Schema = {"type": "integer", "minimum": 0}

CRDS: dict[str, Schema] = {
    **_resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _closed(
            "selector podMetricsEndpoints",
            selector=_SELECTOR,
            namespaceSelector=_NAMESPACES,
            podMetricsEndpoints=_some(_ENDPOINT),
            podTargetLabels={"type": "array", "items": _TEXT},
            jobLabel=_TEXT,
        ),
    ),
    **_resource(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        _closed(
            "selector endpoints",
            selector=_SELECTOR,
            namespaceSelector=_NAMESPACES,
            endpoints=_some(_ENDPOINT),
            targetLabels={"type": "array", "items": _TEXT},
            podTargetLabels={"type": "array", "items": _TEXT},
            jobLabel=_TEXT,
        ),
    ),
    **_resource(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        _closed("groups", groups=_some(_closed("name rules", name=_TEXT, interval=_DURATION, rules=_some(_RULE)))),
    ),
    **_resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _closed(
            "scaleTargetRef triggers",
            scaleTargetRef=_closed("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT, envSourceContainerName=_TEXT),
            pollingInterval={"type": "integer", "minimum": 1},
            cooldownPeriod={"type": "integer", "minimum": 0},
            idleReplicaCount=_REPLICAS,
            minReplicaCount=_REPLICAS,
            maxReplicaCount=_REPLICAS,
            fallback=_closed(
                "failureThreshold replicas",
                failureThreshold=_REPLICAS,
                replicas=_REPLICAS,
                behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
            ),
            advanced=_closed(
                restoreToOriginalReplicaCount={"type": "boolean"}, horizontalPodAutoscalerConfig=_HPA_CONFIG
            ),
            triggers=_some(_TRIGGER),
        ),
    ),
}
"""By "apiVersion/kind"."""
