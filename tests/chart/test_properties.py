"""Any values: what Helm takes, Kubernetes takes too, and the service understands; the rest is refused in words."""

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import DataObject, data
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from producer import cli
from producer.config import ServeConfig, parse_bytes
from tests.chart.invariants import findings
from tests.chart.rendering import Values, container, expand, refusal, render, with_least
from tests.chart.strategies import SCHEMA, made_from, values

QUICKLY = (Phase.explicit, Phase.reuse, Phase.generate)
"""Looking for the smallest example takes minutes where each is rendered by Helm."""
CHECKER = Draft202012Validator(SCHEMA)
ADDRESSES = {"POD_IP": "10.0.0.7", "POD_NAME": "demo-0"}


@pytest.mark.parametrize("name", sorted(SCHEMA["properties"]))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), phases=QUICKLY)
@given(data())
def test_the_schema_takes_what_is_made_up_here(name: str, data: DataObject) -> None:
    """Without Helm, so that there are many."""
    made = data.draw(made_from(SCHEMA["properties"][name], f".{name}"))
    assert list(CHECKER.iter_errors({name: made})) == []


@settings(max_examples=40, suppress_health_check=list(HealthCheck), phases=QUICKLY)
@given(values())
def test_what_is_rendered_is_valid(made: Values) -> None:
    if not is_refused(with_least(made)):
        assert list(findings(render(with_least(made)))) == []


@settings(max_examples=40, suppress_health_check=list(HealthCheck), phases=QUICKLY)
@given(made_from(SCHEMA["properties"]["config"], ".config"))
def test_the_service_gets_the_settings_that_were_given(made: dict[str, Any]) -> None:
    made = {"pool-bytes": "1GiB", "max-queue-bytes": "1GiB"} | {
        name: value for name, value in made.items() if name not in ("pool-bytes", "max-queue-bytes")
    }
    if is_refused(with_least({"config": made})):
        return
    words = container(render(with_least({"config": made})))["args"]
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


def is_refused(values: Values) -> bool:
    """Whether the chart has a sentence against values that the schema takes; no other template may fail on them."""
    said = refusal(values)
    assert not said or "ec-producer/templates/validate.yaml:3" in said, said
    return bool(said)


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
