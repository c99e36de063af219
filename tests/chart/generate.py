"""Writes the chart's values.schema.json, and the tables of its README.md from the comments in values.yaml.

    python -m tests.chart.generate [--check]

With --check it writes nothing, names what is out of date and exits with 1.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from producer.config import ServeConfig
from tests.chart.flags import OWNED, flag_name
from tests.chart.values_schema import build

CHART = Path(__file__).parents[2] / "helm" / "ec-producer"
_FIRST, _MORE, _DEFAULT = "# -- ", "# ", "# @default -- "
_VALUES, _FLAGS = "values", "flags"
Row = tuple[str, str, str]
"""Key, default, description."""


class CommentError(Exception):
    """A value without a description, or a heading that is not where it must be."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chart.generate", description="Schema and README.")
    parser.add_argument("--check", action="store_true", help="say what is out of date, and write nothing")
    check = parser.parse_args().check
    stale = [path for path, text in generated().items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(CHART.parents[1])}")
        if not check:
            path.write_text(generated()[path])
    return int(check and bool(stale))


def generated() -> dict[Path, str]:
    """The files as they must be, by path."""
    readme = CHART / "README.md"
    text = _between(readme.read_text(), _VALUES, _values_table((CHART / "values.yaml").read_text()))
    return {
        CHART / "values.schema.json": json.dumps(build(), indent=1, ensure_ascii=False) + "\n",
        readme: _between(text, _FLAGS, _flags_table()),
        CHART / "templates" / "_sizes.tpl": _sizes(),
    }


def rows(values: str) -> Iterator[tuple[str, Row | None]]:
    """Each section with each described value in it, in order; a section's heading comes alone first.

    Raises:
        CommentError: a value has no description, and nothing around it has one.
    """
    lines = values.splitlines()
    headings = {number: line[3:] for number, line in enumerate(lines) if line.startswith("## ")}
    root = yaml.compose(values, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    section, begun = "", -1
    for line, row in _below(root, "", lines):
        for number in [one for one in headings if begun < one < line]:
            section, begun = headings[number], number
            yield section, None
        yield section, row


def _below(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[tuple[int, Row]]:
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line
        comment, default = _comment(lines, line)
        if comment:
            yield line, (name, default or f"`{json.dumps(_plain(value), ensure_ascii=False)}`", comment)
        elif isinstance(value, yaml.MappingNode) and value.value:
            yield from _below(value, f"{name}.", lines)
        else:
            raise CommentError(f"values.yaml, line {line + 1}: {name} has no comment that begins with {_FIRST!r}")


def _comment(lines: list[str], line: int) -> tuple[str, str]:
    """The description right above a line, and the default that it names instead of the value."""
    words: list[str] = []
    default = ""
    for above in reversed([one.strip() for one in lines[:line]]):
        if above.startswith(_DEFAULT):
            default = above.removeprefix(_DEFAULT)
        elif above.startswith(_FIRST):
            return " ".join([above.removeprefix(_FIRST), *words]), default
        elif above.startswith(_MORE):
            words.insert(0, above.removeprefix(_MORE))
        else:
            break
    return "", ""


def _plain(node: yaml.Node) -> object:
    return yaml.safe_load(yaml.serialize(node))


def _values_table(values: str) -> str:
    lines: list[str] = []
    for section, row in rows(values):
        if row is None:
            lines += [f"\n### {section}\n", "| value | default | |", "|---|---|---|"]
        else:
            lines.append("| `{}` | {} | {} |".format(*(cell.replace("|", "\\|") for cell in row)))
    return "\n".join(lines)


def _flags_table() -> str:
    lines = ["| flag | where |", "|---|---|"]
    for field in dataclasses.fields(ServeConfig):
        name = "MODEL" if field.name == "model" else f"--{flag_name(field.name)}"
        where = OWNED.get(field.name, f"`config.{flag_name(field.name)}`")
        lines.append(f"| `{name}` | {where} |")
    return "\n".join(lines)


def _sizes() -> str:
    """A template with the bounds of each flag that is a size: the schema cannot compare "4GiB" with them."""
    sizes = {flag_name(f.name): [f.metadata["low"], f.metadata["high"]] for f in _settings() if f.metadata["size"]}
    lines = [f'{name}: ["{low}", "{high}"]' for name, (low, high) in sizes.items()]
    head = "{{- /* Bytes that each flag allows, as text; written by tests/chart/generate.py. */ -}}"
    return "\n".join([head, '{{- define "ec-producer.sizes" -}}', *lines, "{{- end }}", ""])


def _settings() -> "list[dataclasses.Field[object]]":
    return [field for field in dataclasses.fields(ServeConfig) if field.name != "model"]


def _between(text: str, name: str, new: str) -> str:
    """`text` with `new` between the two marks of that name."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise CommentError(f"README.md needs {begin} and {end}, once each")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{new}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    sys.exit(main())
