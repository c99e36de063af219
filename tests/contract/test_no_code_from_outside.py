"""Nothing that arrives is ever code: no pickle, no eval, no file format that may hold either.

What the parent of a process gives it at its start is its own, so that multiprocessing is not looked at here.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for name in ("producer", "consumer_shim") for path in (ROOT / name).rglob("*.py"))
MODULES = {
    "pickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "xmlrpc",
    "code",
    "codeop",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
LOADERS = {
    "torch.load",
    "np.load",
    "numpy.load",
    "torch.jit.load",
    "torch.package",
    "runpy.run_path",
    "pandas.read_pickle",
}
BY_NAME = {
    "producer/doctor/probes.py",
    "producer/transport/agent_main.py",
    "producer/transport/mooncake.py",
    "producer/transport/nixl.py",
    "producer/transport/registry.py",
}
"""They import a module by a name that is in a table of theirs, or that their parent process gave them."""


def found_in(source: str) -> list[str]:
    """What could turn bytes into code, and modules that are imported by a name that is made up as it runs."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{one.name}" for one in node.names]
            found += [one for one in names if one.split(".")[0] in MODULES or one in LOADERS]
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found += [name] if name in LOADERS or name == "importlib.import_module" else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_run_what_arrives(path: Path) -> None:
    allowed = ["importlib.import_module"] if str(path.relative_to(ROOT)) in BY_NAME else []
    assert [one for one in found_in(path.read_text()) if one not in allowed] == []


def test_all_modules_are_looked_at() -> None:
    assert len(SOURCES) > 50
    assert {str(path.relative_to(ROOT)) for path in SOURCES} >= BY_NAME


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "import yaml.constructor",
        "def f():\n    import marshal",
        "eval('1')",
        "run = exec",
        "torch.load(file)",
        "from torch import load",
        "np.load(file, allow_pickle=True)",
        "load(file, allow_pickle=flag)",
        "importlib.import_module(name)",
        "from numpy import load as l",
    ],
)
def test_what_could_is_found(source: str) -> None:
    assert found_in(source)


@pytest.mark.parametrize(
    "source", ["import json", "re.compile('a')", "json.load(file)", "'eval(1)'", "from a import load"]
)
def test_what_could_not_is_not(source: str) -> None:
    assert found_in(source) == []
