"""What Kubernetes takes: to check manifests, and for the values that go into a manifest as they are."""

import functools
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, cast

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import best_match  # type: ignore[import-untyped]
from referencing import Registry, Resource

from tests.chart.crds import CRDS

OLDEST, NEWEST = "1.30", "1.37"
"""The versions that manifests are checked for: the chart's oldest, and the newest with a schema here."""

Schema = dict[str, Any]


def trouble(manifest: dict[str, Any], version: str) -> str:
    """What `version` would not take of a manifest, unknown fields included; "" where it takes all."""
    api, kind = str(manifest.get("apiVersion")), str(manifest.get("kind"))
    try:
        validator = _validator(api, kind, version)
    except FileNotFoundError:
        return f"Kubernetes {version} has no {kind} in {api}"
    error = best_match(validator.iter_errors(manifest))
    return f"{'.'.join(str(part) for part in error.absolute_path)}: {error.message}" if error else ""


@functools.cache
def _validator(api: str, kind: str, version: str) -> Draft202012Validator:
    """Of the package `kubernetes_validate`, whose own function reads megabytes at each call; ours for the others."""
    if f"{api}/{kind}" in CRDS:
        return Draft202012Validator(CRDS[f"{api}/{kind}"])
    group, _, number = api.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], number) if part)
    registry = Resource.from_contents(_read(version, "_definitions")) @ Registry()
    return Draft202012Validator(_read(version, name), registry=registry)


@functools.cache
def _read(version: str, name: str) -> Any:
    folder = files("kubernetes_validate").joinpath("kubernetes-json-schema", f"v{version}.0-local-strict")
    return json.loads(folder.joinpath(f"{name}.json").read_text())


def definitions(names: list[str]) -> dict[str, Schema]:
    """Schemas by short name, of `names` and all that they refer to, as references below "#/$defs" want them."""
    found: dict[str, Schema] = {}
    wanted = [_full_name(name) for name in names]
    while wanted:
        name = wanted.pop()
        short = name.rpartition(".")[2]
        if short in found:
            continue
        found[short] = _without_prose(_all()[name])
        wanted += _references(_all()[name])
    return dict(sorted(found.items()))


def _all() -> dict[str, Schema]:
    return cast("dict[str, Schema]", _read(OLDEST, "_definitions")["$defs"])


def _full_name(short: str) -> str:
    found = [name for name in _all() if name.endswith(f".{short}") and name.startswith("io.k8s.api.")]
    assert len(found) == 1, f"{short} is {found}"
    return found[0]


def _references(schema: Any) -> Iterator[str]:
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if key == "$ref":
            yield value.rpartition("/")[2]
        elif isinstance(value, (dict, list)):
            yield from _references(value)


def _without_prose(schema: Any) -> Any:
    """Only what decides: no descriptions, and closed where Kubernetes knows the fields."""
    if isinstance(schema, list):
        return [_without_prose(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "$ref":
            kept[key] = "#/$defs/" + value.rpartition(".")[2]
        elif key == "properties":
            kept[key] = {name: _without_prose(one) for name, one in sorted(value.items())}
        elif key in _DECIDING:
            kept[key] = _without_prose(value)
    if "properties" in kept:
        kept["additionalProperties"] = False
    return kept


_DECIDING = ("type", "items", "additionalProperties", "required", "enum", "oneOf", "anyOf", "allOf", "format")
