"""Any values: what Helm takes, Kubernetes takes too, and the service understands; the rest is refused in words."""

import dataclasses
from typing import Any

import helm_python as helm
import pytest
from hypothesis import HealthCheck, given, settings

from producer import cli
from producer.config import ServeConfig, parse_bytes
from tests.chart.invariants import findings
from tests.chart.rendering import Values, container, expand, render, with_least
from tests.chart.strategies import SCHEMA, made_from, values

ADDRESSES = {"POD_IP": "10.0.0.7", "POD_NAME": "demo-0"}


def test_samples_of_kubernetes_types_are_ones() -> None:
    """Else what the next test finds were its own mistakes."""
    for name, definition in SCHEMA["$defs"].items():
        assert definition, name


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(values())
def test_what_is_rendered_is_valid(made: Values) -> None:
    try:
        manifests = render(with_least(made))
    except helm.HelmRenderError as error:
        assert "ec-producer/templates/validate.yaml:3" in str(error), "a template fails on what the schema takes"
        return
    assert list(findings(manifests)) == []


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(made_from(SCHEMA["properties"]["config"], ".config"))
def test_the_service_gets_the_settings_that_were_given(made: dict[str, Any]) -> None:
    made = {"pool-bytes": "1GiB", "max-queue-bytes": "1GiB"} | {
        name: value for name, value in made.items() if name not in ("pool-bytes", "max-queue-bytes")
    }
    try:
        words = container(render(with_least({"config": made})))["args"]
    except helm.HelmRenderError as error:
        assert "ec-producer/templates/validate.yaml:3" in str(error)
        return
    config = read([expand(word, ADDRESSES) for word in words])
    if config is None:
        assert "otlp-traces-endpoint" in made, "Helm takes what the service then refuses"
        return
    for field in dataclasses.fields(ServeConfig):
        name = field.name.replace("_", "-")
        if name in made:
            wanted = parse_bytes(made[name]) if field.metadata["size"] and isinstance(made[name], str) else made[name]
            assert getattr(config, field.name) == wanted, field.name
    assert config.advertise == "10.0.0.7:50051"


def read(words: list[str]) -> ServeConfig | None:
    """What the real command makes of a command line; None where it refuses it with a sentence and status 2."""
    found: list[ServeConfig] = []

    async def serve(config: ServeConfig) -> None:
        found.append(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("producer.app.serve", serve)
        patch.setattr(cli, "_configure_logging", lambda config: None)
        try:
            status: Any = cli.main(words)
        except SystemExit as exit:
            status = exit.code
    assert status in (0, 2)
    return found[0] if found else None
