"""Checkpoints: deterministic, cached, whole or absent."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import checkpoints
from tests.kit.checkpoints import cached_checkpoint, make_checkpoint
from tests.kit.models import FAMILIES

NEEDED = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
}
MAX_WEIGHTS_BYTES = 4 << 20


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("checkpoints") / "first")


def test_another_process_makes_the_same_bytes(checkpoint: Path) -> None:
    again = checkpoint.with_name("again")
    subprocess.run([sys.executable, "-m", "tests.kit.checkpoints", "qwen2_5_vl", str(again)], check=True)
    assert digests(again) == digests(checkpoint)


@pytest.mark.parametrize("family", FAMILIES)
def test_has_what_vllm_loads(family: str, tmp_path: Path) -> None:
    out = make_checkpoint(family, tmp_path / "out")
    video = {"video_preprocessor_config.json"} if "video" in FAMILIES[family].modalities else set()
    assert set(digests(out)) >= NEEDED | video
    assert (out / "model.safetensors").stat().st_size < MAX_WEIGHTS_BYTES
    config = json.loads((out / "config.json").read_text())
    assert (len(config["architectures"]), config["dtype"]) == (1, "bfloat16")
    assert config["text_config"]["hidden_size"] == 128
    template = (out / "chat_template.jinja").read_text()
    assert all(f"part.type == '{modality}'" in template for modality in FAMILIES[family].modalities)


@pytest.mark.parametrize("family", FAMILIES)
def test_made_again_has_the_same_bytes(family: str, tmp_path: Path) -> None:
    first, second = [make_checkpoint(family, tmp_path / name) for name in ("first", "second")]
    assert digests(first) == digests(second)


def test_every_family_is_described() -> None:
    from tests.kit.families import MAKERS

    assert set(MAKERS) == set(FAMILIES)


def test_leaves_no_draft_behind(checkpoint: Path) -> None:
    assert not [path for path in checkpoint.parent.iterdir() if path.name.startswith(".")]


def test_unknown_family_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'nonsense' is unknown; known are exaone4_5, gemma3, "):
        make_checkpoint("nonsense", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_quicker_process_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def make(draft: Path) -> None:
        (draft / "config.json").write_text("late")
        out.mkdir()
        (out / "config.json").write_text("early")

    monkeypatch.setattr("tests.kit.families.MAKERS", {"fake": make})
    make_checkpoint("fake", out)
    assert (out / "config.json").read_text() == "early"
    assert list(tmp_path.iterdir()) == [out]


def test_a_failed_maker_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(draft: Path) -> None:
        (draft / "config.json").write_text("half")
        raise RuntimeError("disk full")

    monkeypatch.setattr("tests.kit.families.MAKERS", {"fake": make})
    with pytest.raises(RuntimeError, match="disk full"):
        make_checkpoint("fake", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_cache_makes_once_until_the_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(draft: Path) -> None:
        made.append(draft)
        (draft / "config.json").write_text("{}")

    monkeypatch.setattr("tests.kit.families.MAKERS", {"fake": make})
    first = cached_checkpoint("fake", tmp_path)
    assert cached_checkpoint("fake", tmp_path) == first
    assert len(made) == 1
    monkeypatch.setattr(checkpoints, "_fingerprint", lambda: "other-source")
    assert cached_checkpoint("fake", tmp_path) != first
    assert len(made) == 2
