"""What must hold for all manifests of a release, whatever its values. Each finding is a sentence."""

from collections.abc import Iterator
from typing import Any

from tests.chart import kubernetes
from tests.chart.rendering import Manifest, all_of, component, pods, workload

_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}
_LABEL_BYTES = 63


def findings(manifests: list[Manifest]) -> Iterator[str]:
    """All that does not hold."""
    for manifest in manifests:
        for version in (kubernetes.OLDEST, kubernetes.NEWEST):
            if trouble := kubernetes.trouble(manifest, version):
                yield f"{_name(manifest)} on {version}: {trouble}"
        yield from _metadata(manifest)
    yield from _names(manifests)
    for name, pod in pods(manifests):
        yield from (f"{name}: {one}" for one in _pod(pod))
    yield from _references(manifests)


def restricted(pod: Manifest) -> Iterator[str]:
    """What of a pod the pod security standard 'restricted' does not allow."""
    spec = pod["spec"]
    yield from (f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key))
    for volume in spec.get("volumes", ()):
        yield from (f"volume {volume['name']} is {kind}" for kind in set(volume) - {"name"} - _VOLUMES)
    above = spec.get("securityContext") or {}
    for one in (*spec.get("initContainers", ()), *spec["containers"]):
        own = one.get("securityContext") or {}
        both = {**above, **own}
        capabilities = own.get("capabilities") or {}
        holds = {
            "runs as root": both.get("runAsNonRoot") is True and both.get("runAsUser") != 0,
            "has no seccomp profile": (both.get("seccompProfile") or {}).get("type") in ("RuntimeDefault", "Localhost"),
            "may gain privileges": own.get("allowPrivilegeEscalation") is False and not own.get("privileged"),
            "keeps capabilities": capabilities.get("drop") == ["ALL"],
            "adds capabilities": set(capabilities.get("add") or ()) <= {"NET_BIND_SERVICE"},
            "takes ports of the host": not any(port.get("hostPort") for port in one.get("ports", ())),
        }
        yield from (f"container {one['name']} {what}" for what, held in holds.items() if not held)


def _name(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _metadata(manifest: Manifest) -> Iterator[str]:
    metadata = manifest["metadata"]
    if len(metadata["name"]) > _LABEL_BYTES:
        yield f"{_name(manifest)}: its name has {len(metadata['name'])} characters"
    for key, value in (metadata.get("labels") or {}).items():
        if len(value) > _LABEL_BYTES:
            yield f"{_name(manifest)}: label {key} has {len(value)} characters"


def _names(manifests: list[Manifest]) -> Iterator[str]:
    keys = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in manifests]
    yield from (f"{key} is there twice" for key in sorted(set(map(str, keys))) if list(map(str, keys)).count(key) > 1)


def _pod(pod: Manifest) -> Iterator[str]:
    spec = pod["spec"]
    volumes = [one["name"] for one in spec.get("volumes", ())]
    yield from _twice("volume", volumes)
    yield from _twice("container", [one["name"] for one in spec["containers"]])
    if spec.get("automountServiceAccountToken") is not False:
        yield "the service account's token is mounted"
    for one in (*spec.get("initContainers", ()), *spec["containers"]):
        name, mounts = one["name"], one.get("volumeMounts", ())
        yield from _twice(f"{name}: environment", [entry["name"] for entry in one.get("env", ())])
        yield from _twice(f"{name}: mount", [mount["mountPath"] for mount in mounts])
        yield from (f"{name}: no volume {mount['name']}" for mount in mounts if mount["name"] not in volumes)
        yield from _ports(one)
        if one["image"].endswith(":latest") or not {":", "@"} & set(one["image"].rpartition("/")[2]):
            yield f"{name}: image {one['image']} is not pinned"
        order = [entry["name"] for entry in one.get("env", ())]
        yield from _late(name, one, order)


def _late(name: str, container: dict[str, Any], order: list[str]) -> Iterator[str]:
    """What an argument refers to must be in the environment; Kubernetes leaves the text as it is otherwise."""
    for word in container.get("args", ()):
        plain = word.replace("$$", "")
        for part in plain.split("$(")[1:]:
            if part.partition(")")[0] not in order:
                yield f"{name}: {word} refers to what is not in its environment"


def _ports(container: dict[str, Any]) -> Iterator[str]:
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind) or {}
        asked = (probe.get("httpGet") or probe.get("grpc") or {}).get("port")
        if asked is not None and asked not in ports and asked not in ports.values():
            yield f"{container['name']}: {kind} asks port {asked}, which it does not have"


def _references(manifests: list[Manifest]) -> Iterator[str]:
    """Every selector meets its pods, and every name that is pointed at is there."""
    labels = {name: pod["metadata"].get("labels") or {} for name, pod in pods(manifests)}
    for manifest in manifests:
        kind, spec = manifest["kind"], manifest.get("spec") or {}
        if kind in ("Deployment", "StatefulSet"):
            own = spec["template"]["metadata"]["labels"]
            yield from _unmet(manifest, spec["selector"]["matchLabels"], [own])
        elif kind == "Service":
            yield from _unmet(manifest, spec["selector"], list(labels.values()))
        elif kind in ("PodDisruptionBudget", "PodMonitor"):
            yield from _unmet(manifest, spec["selector"]["matchLabels"], list(labels.values()))
        elif kind == "NetworkPolicy":
            yield from _unmet(manifest, spec["podSelector"]["matchLabels"], list(labels.values()))
        elif kind == "ServiceMonitor":
            theirs = [one["metadata"]["labels"] for one in all_of(manifests, "Service")]
            yield from _unmet(manifest, spec["selector"]["matchLabels"], theirs)
        elif kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = spec["scaleTargetRef"]
            if (target["kind"], target["name"]) != (
                workload(manifests)["kind"],
                workload(manifests)["metadata"]["name"],
            ):
                yield f"{_name(manifest)} scales {target}, which is not there"
            if "replicas" in workload(manifests)["spec"]:
                yield f"{_name(manifest)} scales what has a number of replicas of its own"


def _unmet(manifest: Manifest, wanted: dict[str, str], found: list[dict[str, str]]) -> Iterator[str]:
    met = [one for one in found if wanted.items() <= one.items()]
    if len(met) != 1:
        yield f"{_name(manifest)}: its selector meets {len(met)} of {len(found)}, not one"
    if component(manifest) and wanted.get("app.kubernetes.io/component") != component(manifest):
        yield f"{_name(manifest)}: it selects another component than its own"


def _twice(what: str, names: list[str]) -> Iterator[str]:
    yield from (f"{what} {name} is there twice" for name in sorted(set(names)) if names.count(name) > 1)
