"""The few words that values.schema.json is made of."""

from typing import Any

Schema = dict[str, Any]

FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def closed(**properties: Schema) -> Schema:
    """An object of these properties and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def text(pattern: str = "") -> Schema:
    return {"type": "string"} | ({"pattern": pattern} if pattern else {})


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}
