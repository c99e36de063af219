"""Every call, field and value of the .proto is explained where it is declared."""

import re
from pathlib import Path

import pytest

from producer.wire.pb import encoder_cache_pb2 as pb

PROTO = Path(__file__).parents[2] / "proto" / "ec_producer" / "v1" / "encoder_cache.proto"
BLOCK = re.compile(r"(message|enum|service|oneof) (\w+) \{(\})?")
DECLARATION = re.compile(r"rpc (\w+)\(|(?:[\w.<>, ]+ )?(\w+) = \d+;")


def declarations(text: str) -> dict[str, str]:
    """What `text` declares, by its path such as `Ticket.key`, and the comment right above it."""
    found: dict[str, str] = {}
    blocks: list[str] = []
    comment: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        if block := BLOCK.match(line):
            if not block[3]:
                blocks.append("" if block[1] == "oneof" else f"{block[2]}.")
        elif declaration := DECLARATION.match(line):
            found["".join(blocks) + (declaration[1] or declaration[2])] = " ".join(comment)
        elif line == "}":
            blocks.pop()
        comment = []
    assert not blocks, "the reader of this test lost its way"
    return found


def test_everything_declared_has_a_comment() -> None:
    assert [name for name, comment in declarations(PROTO.read_text()).items() if not comment] == []


def test_nothing_declared_is_overlooked() -> None:
    file = pb.DESCRIPTOR
    fields = {f"{kind.name}.{field.name}" for kind in file.message_types_by_name.values() for field in kind.fields}
    values = {f"{kind.name}.{value.name}" for kind in file.enum_types_by_name.values() for value in kind.values}
    calls = {f"{kind.name}.{call.name}" for kind in file.services_by_name.values() for call in kind.methods}
    assert set(declarations(PROTO.read_text())) == fields | values | calls


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        ("message A {\n  // Explained.\n  string one = 1;\n  string two = 2;\n}", "A.two"),
        ("message A {\n  // Of another thing.\n\n  repeated int64 one = 1;\n}", "A.one"),
        ("message A {\n  oneof kind {\n    google.rpc.Status one = 1;\n  }\n}", "A.one"),
        ("message A {\n  map<string, int64> one = 1;\n}", "A.one"),
        ("// Of the enum.\nenum A {\n  ONE = 0;\n}", "A.ONE"),
        ("service A {\n  rpc One(B) returns (stream C);\n}", "A.One"),
    ],
)
def test_what_has_no_comment_is_found(declared: str, name: str) -> None:
    assert [name for name, comment in declarations(declared).items() if not comment] == [name]
