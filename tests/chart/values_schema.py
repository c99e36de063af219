"""values.schema.json as it must be: the chart's own structure, the flags of `ec-producer serve`, Kubernetes' types."""

from producer.transport.registry import MOONCAKE_PROTOCOLS
from tests.chart.crds import RELABELING
from tests.chart.flags import config_schema, drain_schema, shim_schema
from tests.chart.kubernetes import definitions
from tests.chart.schema_words import FLAG, TEXTS, Schema, closed, many, number, one_of, text, whole

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


def tag() -> Schema:
    """Of an image; Go's patterns cannot say 'not'."""
    return {**text(_TAG), "not": {"const": "latest"}}


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
        "config": config_schema(),
        "extraArgs": WORDS,
        "ports": closed(grpc=whole(1024, 65535), metrics=whole(1024, 65535)),
        "ipv6": FLAG,
        "advertiseHost": text(r"^[^\s:/]*$"),
        "drain": closed(preStopSeconds=whole(0, 300), deadlineSeconds=drain_schema()),
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
        shim=shim_schema(),
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
