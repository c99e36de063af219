"""`docs/contract.md`: every promise names a test, and every test that it names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "contract.md").read_text()
PROMISES = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", TEXT, re.MULTILINE)


def defined_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_names_a_test_that_exists() -> None:
    assert [int(number) for number, *_ in PROMISES] == list(range(1, len(PROMISES) + 1))
    assert len(PROMISES) > 20
    for number, _, where in PROMISES:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", where)
        assert named, f"promise {number} names no test"
        for path, name in named:
            assert name in defined_in(path), f"promise {number}: {path} has no {name}"


def test_every_limit_is_a_flag_with_its_default() -> None:
    from producer.config import ServeConfig

    fields = ServeConfig.__dataclass_fields__
    units = {"": 1, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1}
    rows = re.findall(r"^\| [^|]+ \| `--([a-z-]+)` \| ([\d,.]+|none) ?(\w*) \|", TEXT, re.MULTILINE)
    assert len(rows) >= 10
    for flag, number, unit in rows:
        default = fields[flag.replace("-", "_")].default
        assert default == (0 if number == "none" else float(number.replace(",", "")) * units[unit]), flag
