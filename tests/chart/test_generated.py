"""values.schema.json and README.md are what the generator makes, and nothing is missing in them."""

import dataclasses
import json
from typing import Any

import pytest
import yaml

from producer.config import ServeConfig
from tests.chart.flags import OWNED, flag_name
from tests.chart.generate import CHART, CommentError, generated, rows

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def test_nothing_is_out_of_date() -> None:
    stale = [path.name for path, text in generated().items() if path.read_text() != text]
    assert stale == [], "python -m tests.chart.generate writes them"


def test_the_schema_has_what_the_values_have() -> None:
    assert list(differences("", SCHEMA, VALUES)) == []


def differences(path: str, schema: dict[str, Any], values: dict[str, Any]) -> Any:
    """Keys that only one side has, where the chart itself decides which there are."""
    known = schema.get("properties")
    if known is None or path in (".config", ".consumer.shim", ".consumer.limitMmPerPrompt"):
        return
    yield from (f"{path}.{key}: not in the schema" for key in values.keys() - known.keys())
    yield from (f"{path}.{key}: not in values.yaml" for key in known.keys() - values.keys() - {"global"})
    for key, value in values.items():
        if isinstance(value, dict) and key in known:
            yield from differences(f"{path}.{key}", known[key], value)


def test_every_object_is_closed() -> None:
    """Maps of texts, a flag's JSON, whole objects and Helm's own are the exceptions."""
    free = sorted(path for path in open_objects("", SCHEMA) if "$defs" not in path)
    assert free == ["/config/media-io-kwargs", "/config/mm-processor-kwargs", "/global"]


def open_objects(path: str, schema: Any) -> Any:
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        yield path
    for key, value in schema.get("properties", {}).items():
        yield from open_objects(f"{path}/{key}", value)


def test_every_flag_can_be_set() -> None:
    names = {field.name for field in dataclasses.fields(ServeConfig)}
    config = set(SCHEMA["properties"]["config"]["properties"])
    assert config == {flag_name(name) for name in names - OWNED.keys()}
    assert OWNED.keys() <= names


def test_every_value_is_described() -> None:
    found = [row for _, row in rows((CHART / "values.yaml").read_text()) if row]
    assert len(found) > 120
    for name, _, text in found:
        assert text.endswith((".", ":")), f"{name}: a description is a sentence"


@pytest.mark.parametrize("values", ["a: 1\n", "# a comment\na: 1\n", "# -- for a\n\na: 1\n", "a:\n  b: 1\n"])
def test_a_value_without_a_description_is_refused(values: str) -> None:
    with pytest.raises(CommentError, match="has no comment"):
        list(rows(values))


def test_a_description_may_have_several_lines() -> None:
    text = "## First\n\n# -- One\n# two.\n# @default -- three\na: {b: 1}\n\n## Second\n\nc:\n  # -- Four.\n  d: [x]\n"
    assert list(rows(text)) == [
        ("First", None),
        ("First", ("a", "three", "One two.")),
        ("Second", None),
        ("Second", ("c.d", '`["x"]`', "Four.")),
    ]


def test_there_is_a_case_for_each_way_to_run_it() -> None:
    names = {path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir()}
    assert names >= {"single-gpu", "rdma", "autoscaled", "keda", "tls", "mooncake", "consumer", "everything"}
