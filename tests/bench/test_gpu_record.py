"""Figures are in the file as they come."""

import json
from pathlib import Path

from bench.gpu_record import Record


def test_each_figure_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    record = Record(path, {"command": "c", "failures": []})
    assert json.loads(path.read_text()) == {"command": "c", "failures": []}
    record.put("step/ours/1x448", {"replay_ms": 3.0})
    record.put("step/ours/overhead_ms", 0.2)
    record.add("failures", "one")
    record.add("failures", "two")
    found = json.loads(path.read_text())
    assert found["step"] == {"ours": {"1x448": {"replay_ms": 3.0}, "overhead_ms": 0.2}}
    assert found["failures"] == ["one", "two"]
    assert [one.name for one in tmp_path.iterdir()] == ["gpu.json"]


def test_what_is_not_there_is_the_default(tmp_path: Path) -> None:
    record = Record(tmp_path / "gpu.json", {})
    record.put("a/b", 1.0)
    assert (record.get("a/b"), record.get("a/b/c"), record.get("a/x", 5), record.get("x/y")) == (1.0, None, 5, None)
