"""The chart as Helm renders it, offline: manifests of given values, and what tests ask of them."""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from tests.chart.generate import CHART

RELEASE, NAMESPACE = "demo", "serving"
Manifest = dict[str, Any]
Values = dict[str, Any]

CASES = sorted((CHART / "ci").glob("*-values.yaml"))
"""The values of real cases."""
LEAST: Values = {"image": {"repository": "registry.example/ec-producer"}, "model": {"name": "some/model"}}
"""The fewest values that a release needs."""


def name_of(case: Path) -> str:
    return case.name.removesuffix("-values.yaml")


def values_of(name: str) -> Values:
    """Of a case in ci/, as Helm reads them."""
    return helm.values_from_yaml((CHART / "ci" / f"{name}-values.yaml").read_text())


@functools.cache
def chart() -> helm.Chart:
    """The chart, loaded once."""
    return helm.Chart.load(CHART)


def texts(values: Values, *, release: str = RELEASE) -> dict[str, str]:
    """What Helm makes of each template. Raises what Helm raises: HelmValuesError, HelmRenderError."""
    return chart().render(values, name=release, namespace=NAMESPACE)


def render(values: Values, *, release: str = RELEASE) -> list[Manifest]:
    """All manifests, in the templates' order."""
    found: list[Manifest] = []
    for path, text in texts(values, release=release).items():
        if not path.endswith("NOTES.txt"):
            found += [one for one in yaml.load_all(text, Loader=_Strict) if one]
    return found


def notes(values: Values) -> str:
    """What Helm says after an installation."""
    return next(text for path, text in texts(values).items() if path.endswith("NOTES.txt"))


def with_least(values: Values) -> Values:
    """These values, and what a release needs beside them."""
    return merged(LEAST, values)


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> Values:
    """As Helm merges values: maps by key, `high` over `low`."""
    both = dict(low)
    for key, value in high.items():
        below = both.get(key)
        both[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def refusal(values: Values) -> str:
    """What Helm says of values that it does not take; "" where it takes them."""
    try:
        texts(values)
    except (helm.HelmValuesError, helm.HelmRenderError) as error:
        return str(error)
    return ""


def of_kind(manifests: list[Manifest], kind: str, suffix: str = "") -> Manifest:
    """The one manifest of that kind whose name ends so; AssertionError where there is not exactly one."""
    found = [one for one in all_of(manifests, kind) if one["metadata"]["name"].endswith(suffix)]
    if not suffix:
        found = [one for one in found if component(one) == "producer"] or found
        found = sorted(found, key=lambda one: len(one["metadata"]["name"]))[:1]
    assert len(found) == 1, f"{kind} {suffix!r}: {len(found)} of them"
    return found[0]


def all_of(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def component(manifest: Manifest) -> str:
    labels: dict[str, str] = manifest["metadata"].get("labels") or {}
    return labels.get("app.kubernetes.io/component", "")


def workload(manifests: list[Manifest]) -> Manifest:
    """The Deployment or StatefulSet of the producer."""
    found = [one for one in manifests if one["kind"] in ("Deployment", "StatefulSet") and component(one) == "producer"]
    assert len(found) == 1, found
    return found[0]


def pod(manifests: list[Manifest]) -> Manifest:
    """The producer's pod template."""
    template: Manifest = workload(manifests)["spec"]["template"]
    return template


def container(manifests: list[Manifest]) -> Manifest:
    """The producer's container."""
    found: Manifest = next(one for one in pod(manifests)["spec"]["containers"] if one["name"] == "producer")
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod that the manifests make: its owner's name, and the pod or pod template."""
    for one in manifests:
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one
        elif one["kind"] in ("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]


def flags(words: list[str]) -> dict[str, list[str]]:
    """A command line's flags, each with its values; a flag without one has ""."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found.setdefault(name, []).append(value)
    return found


def environment_of(container: Manifest) -> dict[str, Any]:
    """A container's environment by name: texts, or where they come from."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container.get("env", ())}


def expand(text: str, environment: Mapping[str, str]) -> str:
    """What Kubernetes makes of an argument: $(NAME) is replaced where it is known, $$ is a dollar sign."""

    def one(match: "re.Match[str]") -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", one, text)


class _Strict(yaml.CSafeLoader):
    """Refuses a key that is there twice, as Kubernetes does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{', '.join(twice)} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)
