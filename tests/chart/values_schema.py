"""values.schema.json as it must be: the chart's own structure, the flags of `ec-producer serve`, Kubernetes' types."""

import dataclasses
from typing import Any

from consumer_shim.config import TRANSPORTS, ShimConfig
from producer.config import ServeConfig
from producer.transport.registry import MOONCAKE_PROTOCOLS
from tests.chart.crds import RELABELING
from tests.chart.kubernetes import definitions

Schema = dict[str, Any]

OWNED = {
    "model": "`model.name`, `model.path`",
    "listen": "`ports.grpc`, `ipv6`",
    "metrics_listen": "`ports.metrics`, `ipv6`",
    "advertise": "`advertiseHost`",
    "tls_cert": "`tls.enabled`, `tls.secret`",
    "tls_key": "`tls.enabled`, `tls.secret`",
    "tls_client_ca": "`tls.clientCaSecret`",
    "token_file": "`tokens.secret`",
    "transport": "`transports.nixl.enabled`, `transports.mooncake.enabled`",
    "nixl_devices": "`transports.nixl.devices`",
    "mooncake_host": "always the pod's address",
    "mooncake_protocol": "`transports.mooncake.protocol`",
    "revision": "`model.revision`",
    "trust_remote_code": "`model.trustRemoteCode`",
    "publish_files": "`files.claim`",
    "drain_s": "`drain.deadlineSeconds`",
}
"""Settings that are not in `config`, and the values that decide them."""
SHIM_OWNED = ("producers", "mooncake_host", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file")
"""Settings of the shim that the chart decides."""

_FLAG_PATTERNS = {"otlp_traces_endpoint": r"^((https?://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5})?$"}
"""What a flag of text takes, where that is known."""
_SIZE = r"^[0-9]{1,20}(\.[0-9]{1,20})? ?(KiB|MiB|GiB|TiB|)$"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
_IMAGE = r"^([a-z0-9][a-z0-9._/:-]*[a-z0-9])?$"
_TAG = r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$"
_PINNED = r"^$|^[^@]*[^@/]:[^/@]+$|@sha256:[0-9a-f]{64}$"
_DIGEST = "^(sha256:[0-9a-f]{64})?$"
_NAME = r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"
_SHORT_NAME = r"^([a-z]([a-z0-9-]{0,40}[a-z0-9])?)?$"
_KEY = r"^[A-Za-z0-9._-]+$"
_RESOURCE = r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"
_URL = r"^(https?://[^\s]+)?$"
_DURATION = "^([0-9]+(ms|s|m|h|d))+$"
_FOLDER = "^([A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*)?$"
_PATH = "^(/[A-Za-z0-9._-]+)+$"


def closed(**properties: Schema) -> Schema:
    """An object of these properties and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def text(pattern: str = "") -> Schema:
    return {"type": "string"} | ({"pattern": pattern} if pattern else {})


def tag() -> Schema:
    """Of an image; Go's patterns cannot say 'not'."""
    return {**text(_TAG), "not": {"const": "latest"}}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def kind(name: str) -> Schema:
    """One of Kubernetes' own types."""
    return {"$ref": f"#/$defs/{name}"}


def build() -> Schema:
    """The whole schema."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the ec-producer chart",
        **closed(**_service(), **_manifests(), **_extras(), consumer=_consumer()),
        "$defs": definitions(_KUBERNETES),
    }


FLAG, TEXTS = {"type": "boolean"}, {"type": "object", "additionalProperties": {"type": "string"}}
WORDS, QUANTITY, NAME = many(text()), text(_QUANTITY), text(_NAME)
_SECONDS = whole(1, 86400)
_KUBERNETES = [
    *(
        "Affinity",
        "Container",
        "EnvFromSource",
        "EnvVar",
        "HorizontalPodAutoscalerBehavior",
        "LocalObjectReference",
        "MetricSpec",
    ),
    *("NetworkPolicyEgressRule", "NetworkPolicyPeer", "PodSecurityContext", "ResourceRequirements", "SecurityContext"),
    *("Toleration", "TopologySpreadConstraint", "Volume", "VolumeMount"),
]


def flag_name(setting: str) -> str:
    """Of a field of ServeConfig."""
    return setting.replace("_", "-")


def _flag(field: "dataclasses.Field[Any]") -> Schema:
    """What `config` takes for a setting."""
    meta = field.metadata
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[operator]
    found: Schema = {"description": meta["help"]}
    if isinstance(default, bool):
        return found | FLAG
    if isinstance(default, dict):
        return found | {"type": "object"}
    if meta["choices"]:
        return found | one_of(*meta["choices"])
    if meta["size"]:
        return found | {
            "type": ["string", "integer"],
            "pattern": _SIZE,
            "minimum": meta["low"],
            "maximum": meta["high"],
        }
    if isinstance(default, int):
        return found | whole(int(meta["low"]), int(meta["high"]))
    pattern = _FLAG_PATTERNS.get(field.name, "")
    return found | (number(meta["low"], meta["high"]) if isinstance(default, float) else text(pattern))


def _config() -> Schema:
    fields = (field for field in dataclasses.fields(ServeConfig) if field.name not in OWNED)
    return closed(**{flag_name(field.name): _flag(field) for field in fields})


def _drain() -> Schema:
    meta = next(field.metadata for field in dataclasses.fields(ServeConfig) if field.name == "drain_s")
    return number(meta["low"], meta["high"])


def _shim() -> Schema:
    found: dict[str, Schema] = {}
    for field in dataclasses.fields(ShimConfig):
        if field.name in SHIM_OWNED:
            continue
        meta, default = field.metadata, field.default
        if meta:
            found[field.name] = (whole if isinstance(default, int) else number)(meta["low"], meta["high"])
        else:
            found[field.name] = text()
    found["transport"] = one_of(*TRANSPORTS)
    found["mooncake_protocol"] = one_of(*MOONCAKE_PROTOCOLS)
    found["fingerprint"] = text("^([0-9a-f]{64})?$")
    return closed(**found)


def _service() -> dict[str, Schema]:
    """What decides the service's own command line and what its pod has."""
    ports = closed(first=whole(1024, 65535), last=whole(1024, 65535))
    init = closed(
        image={**text(_PINNED), "not": {"pattern": ":latest$"}},
        command=WORDS,
        args=WORDS,
        env=many(kind("EnvVar")),
        resources=kind("ResourceRequirements"),
        claim=NAME,
        sizeLimit=QUANTITY,
    )
    return {
        "image": closed(
            repository=text(_IMAGE),
            tag=tag(),
            digest=text(_DIGEST),
            pullPolicy=one_of("Always", "IfNotPresent", "Never"),
        ),
        "imagePullSecrets": many(kind("LocalObjectReference")),
        "model": closed(
            source=one_of("hub", "pvc", "init"),
            name=text(r"^[^\s-][^\s]*$|^$"),
            path=text(_FOLDER),
            revision=text(),
            trustRemoteCode=FLAG,
            mountPath=text(_PATH),
            hub=closed(
                tokenSecret=NAME, tokenKey=text(_KEY), endpoint=text(_URL), cacheClaim=NAME, cacheSizeLimit=QUANTITY
            ),
            pvc=closed(claim=NAME, subPath=text(_FOLDER)),
            init=init,
        ),
        "config": _config(),
        "extraArgs": WORDS,
        "ports": closed(grpc=whole(1024, 65535), metrics=whole(1024, 65535)),
        "ipv6": FLAG,
        "advertiseHost": text(r"^[^\s:/]*$"),
        "drain": closed(preStopSeconds=whole(0, 300), deadlineSeconds=_drain()),
        "tls": closed(enabled=FLAG, secret=NAME, clientCaSecret=NAME),
        "tokens": closed(secret=NAME, key=text(_KEY)),
        "gpu": closed(enabled=FLAG, resource=text(_RESOURCE)),
        "resources": kind("ResourceRequirements"),
        "shm": closed(sizeLimit=QUANTITY),
        "scratch": closed(tmpSizeLimit=QUANTITY, homeSizeLimit=QUANTITY),
        "hugepages": closed(size=one_of("", "2Mi", "1Gi"), amount=QUANTITY),
        "rdma": closed(enabled=FLAG, resource=text(_RESOURCE), count=whole(1, 64), ipcLock=FLAG),
        "transports": closed(
            nixl=closed(enabled=FLAG, devices=text(), ports=ports),
            mooncake=closed(enabled=FLAG, protocol=one_of(*MOONCAKE_PROTOCOLS), metadata=one_of("p2p"), ports=ports),
        ),
        "files": closed(claim=NAME, mountPath=text(_PATH)),
    }


def _manifests() -> dict[str, Schema]:
    """What decides the objects around it."""
    peers = many(kind("NetworkPolicyPeer"))
    count: Schema = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]{1,3}%?$"}
    monitor = closed(
        enabled=FLAG,
        labels=TEXTS,
        interval=text(_DURATION),
        scrapeTimeout=text(_DURATION),
        relabelings=many(RELABELING),
        metricRelabelings=many(RELABELING),
    )
    return {
        "podSecurityContext": kind("PodSecurityContext"),
        "containerSecurityContext": kind("SecurityContext"),
        "serviceAccount": closed(create=FLAG, name=NAME, annotations=TEXTS),
        "networkPolicy": closed(
            enabled=FLAG,
            consumers=peers,
            clients=peers,
            monitoring=peers,
            egress=closed(enabled=FLAG, rules=many(kind("NetworkPolicyEgressRule"))),
        ),
        "workload": closed(
            kind=one_of("Deployment", "StatefulSet"),
            replicas=whole(0, 1000),
            maxSurge=count,
            maxUnavailable=count,
            minReadySeconds=whole(0, 3600),
            revisionHistoryLimit=whole(0, 100),
            annotations=TEXTS,
        ),
        "autoscaling": closed(
            kind=one_of("none", "hpa", "keda"),
            minReplicas=whole(1, 1000),
            maxReplicas=whole(1, 1000),
            queueWaitSeconds=number(0.001, 3600),
            quantile=number(0.5, 0.999),
            window=text(_DURATION),
            behavior=kind("HorizontalPodAutoscalerBehavior"),
            hpa=closed(
                metric=text("^[a-zA-Z_][a-zA-Z0-9_]*$"), recordingRule=FLAG, extraMetrics=many(kind("MetricSpec"))
            ),
            keda=closed(
                serverAddress=text(r"^https?://[^\s]+$"),
                pollingInterval=_SECONDS,
                authenticationRef=NAME,
                fallbackReplicas=whole(0, 1000),
            ),
        ),
        "pdb": closed(enabled=FLAG, maxUnavailable=count, minAvailable=count | {"pattern": "^([0-9]{1,3}%?)?$"}),
        "probes": closed(
            startup=closed(timeoutSeconds=whole(10, 86400), periodSeconds=whole(1, 300)),
            readiness=closed(periodSeconds=whole(1, 300), failureThreshold=whole(1, 100)),
            liveness=closed(enabled=FLAG, periodSeconds=whole(1, 300), afterSeconds=whole(10, 86400)),
        ),
        "service": closed(
            type=one_of("ClusterIP", "NodePort", "LoadBalancer"),
            annotations=TEXTS,
            sessionAffinity=FLAG,
            headlessAnnotations=TEXTS,
        ),
        "metrics": closed(
            podMonitor=monitor,
            serviceMonitor=monitor,
            prometheusRule=closed(
                enabled=FLAG, labels=TEXTS, alertLabels=TEXTS, disabled=WORDS, runbookBase=text(_URL)
            ),
            dashboard=closed(enabled=FLAG, labels=TEXTS, annotations=TEXTS, namespace=NAME),
        ),
    }


def _placing() -> dict[str, Schema]:
    return {"nodeSelector": TEXTS, "tolerations": many(kind("Toleration")), "affinity": kind("Affinity")}


def _extras() -> dict[str, Schema]:
    return {
        **_placing(),
        "topologySpreadConstraints": many(kind("TopologySpreadConstraint")),
        "runtimeClassName": NAME,
        "priorityClassName": NAME,
        "schedulerName": text(),
        "shareProcessNamespace": FLAG,
        "nameOverride": text(_SHORT_NAME),
        "fullnameOverride": text(_SHORT_NAME),
        "commonLabels": TEXTS,
        "commonAnnotations": TEXTS,
        "podLabels": TEXTS,
        "podAnnotations": TEXTS,
        "extraEnv": many(kind("EnvVar")),
        "extraEnvFrom": many(kind("EnvFromSource")),
        "extraVolumes": many(kind("Volume")),
        "extraVolumeMounts": many(kind("VolumeMount")),
        "extraContainers": many(kind("Container")),
        "extraInitContainers": many(kind("Container")),
        "extraObjects": many({"type": ["object", "string"]}),
        "test": closed(enabled=FLAG),
        "global": {"type": "object", "description": "Helm's own, for charts that have this one below them"},
    }


def _consumer() -> Schema:
    return closed(
        enabled=FLAG,
        replicas=whole(0, 1000),
        image=closed(repository=text(_IMAGE), tag=tag(), digest=text(_DIGEST)),
        servedModelName=text(),
        limitMmPerPrompt=closed(image=whole(0, 0), video=whole(0, 0), audio=whole(0, 0)),
        shim=_shim(),
        tlsCaSecret=NAME,
        tlsSecret=NAME,
        tlsServerName=text(),
        tokenSecret=NAME,
        tokenKey=text(_KEY),
        extraArgs=WORDS,
        extraEnv=many(kind("EnvVar")),
        gpu=closed(enabled=FLAG, resource=text(_RESOURCE), count=whole(1, 64)),
        resources=kind("ResourceRequirements"),
        shmSizeLimit=QUANTITY,
        startupTimeoutSeconds=whole(10, 86400),
        port=whole(1024, 65535),
        **_placing(),
    )
