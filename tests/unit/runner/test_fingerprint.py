"""The fingerprint: the same wherever the same encoder lies, another one for whatever decides its bytes."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file

from producer.runner.fingerprint import fingerprint

SETTINGS = {"dtype": "bfloat16", "fidelity": "exact", "mm_processor_kwargs": {}, "media_io_kwargs": {}}


def is_encoder_weight(name: str) -> bool:
    return name.startswith("visual.")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    names = ("visual.a", "visual.b", "visual.c", "lm.a", "lm.b")
    return {name: torch.randn(4, 6, generator=generator).to(torch.bfloat16) for name in names}


def write(
    folder: Path, weights: dict[str, torch.Tensor] | None = None, shards: Iterable[tuple[str, Iterable[str]]] = ()
) -> Path:
    """A checkpoint of `weights`, spread over `shards` (file name and the tensors in it), or in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights or tensors()
    for name, names in shards or [("model.safetensors", weights)]:
        save_file({key: weights[key] for key in names}, folder / name)
    (folder / "config.json").write_text(json.dumps({"model_type": "m", "vision_config": {"depth": 2}}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14}))
    return folder


def digest(folder: Path, **settings: Any) -> str:
    return fingerprint(folder, is_encoder_weight, {**SETTINGS, **settings})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def test_is_64_hex_digits_and_stable(folder: Path) -> None:
    assert len(bytes.fromhex(digest(folder))) == 32
    assert digest(folder) == digest(folder)


# What does not matter


@pytest.mark.parametrize(
    "shards",
    [
        [("a.safetensors", ["visual.a", "lm.a"]), ("b.safetensors", ["visual.b", "visual.c", "lm.b"])],
        [("b.safetensors", ["visual.a", "lm.a"]), ("a.safetensors", ["visual.b", "visual.c", "lm.b"])],
        [("only.safetensors", ["lm.b", "visual.c", "visual.b", "lm.a", "visual.a"])],
    ],
    ids=["two", "swapped", "renamed"],
)
def test_how_tensors_are_spread_over_files_does_not_matter(
    folder: Path, tmp_path: Path, shards: list[tuple[str, list[str]]]
) -> None:
    assert digest(write(tmp_path / "other", shards=shards)) == digest(folder)


def test_where_the_folder_lies_does_not_matter(folder: Path, tmp_path: Path) -> None:
    before = digest(folder)
    assert digest(folder.rename(tmp_path / "moved")) == before


def test_metadata_of_files_does_not_matter(folder: Path) -> None:
    before = digest(folder)
    save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    assert digest(folder) == before


def test_layout_of_configuration_files_does_not_matter(folder: Path) -> None:
    before = digest(folder)
    (folder / "config.json").write_text('{\n  "vision_config": {"depth": 2},\n  "model_type": "m"\n}\n')
    assert digest(folder) == before


def test_other_files_do_not_matter(folder: Path) -> None:
    before = digest(folder)
    (folder / "README.md").write_text("words")
    (folder / "tokenizer.json").write_text("{}")
    assert digest(folder) == before


def test_the_language_model_does_not_matter(folder: Path, tmp_path: Path) -> None:
    other = {name: tensor if is_encoder_weight(name) else tensor + 1 for name, tensor in tensors().items()}
    assert digest(write(tmp_path / "other", other)) == digest(folder)


def test_the_language_model_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this many bytes are hashed: those of the encoder's tensors, beside their names."""
    num_hashed = 0

    class Counting:
        AUTO = blake3.AUTO

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._hash = blake3(*args, **kwargs)

        def update(self, data: memoryview) -> None:
            nonlocal num_hashed
            num_hashed += data.nbytes
            self._hash.update(data)

        def hexdigest(self) -> str:
            return self._hash.hexdigest()

    before = digest(folder)
    monkeypatch.setattr("producer.runner.fingerprint.blake3", Counting)
    assert digest(folder) == before
    assert num_hashed == 3 * 4 * 6 * 2


def test_a_file_without_encoder_weights_is_not_opened(folder: Path, tmp_path: Path) -> None:
    encoder = [name for name in tensors() if is_encoder_weight(name)]
    other = write(tmp_path / "other", shards=[("a.safetensors", encoder)])
    places = {name: "a.safetensors" if is_encoder_weight(name) else "b.safetensors" for name in tensors()}
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (other / "b.safetensors").write_bytes(b"not looked at")
    assert digest(other) == digest(folder)


# What matters


def test_one_bit_of_a_weight_matters(folder: Path, tmp_path: Path) -> None:
    other = tensors()
    other["visual.c"].view(torch.int16)[3, 5] ^= 1
    assert digest(write(tmp_path / "other", other)) != digest(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.view(torch.float16),
        lambda weight: weight.reshape(6, 4),
    ],
    ids=["dtype", "shape"],
)
def test_what_the_bytes_of_a_weight_mean_matters(folder: Path, tmp_path: Path, change: Any) -> None:
    other = tensors()
    other["visual.a"] = change(other["visual.a"])
    assert digest(write(tmp_path / "other", other)) != digest(folder)


def test_which_weight_is_which_matters(folder: Path, tmp_path: Path) -> None:
    other = tensors()
    other["visual.a"], other["visual.b"] = other["visual.b"], other["visual.a"]
    assert digest(write(tmp_path / "other", other)) != digest(folder)


def test_an_absent_weight_matters(folder: Path, tmp_path: Path) -> None:
    other = tensors()
    del other["visual.b"]
    assert digest(write(tmp_path / "other", other)) != digest(folder)


def test_which_weights_are_the_encoders_matters(folder: Path) -> None:
    assert fingerprint(folder, lambda name: True, SETTINGS) != digest(folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "float32"},
        {"fidelity": "fast"},
        {"mm_processor_kwargs": {"max_pixels": 100}},
        {"media_io_kwargs": {"image": {"image_mode": "L"}}},
        {"new": None},
    ],
    ids=str,
)
def test_settings_matter(folder: Path, changed: dict[str, Any]) -> None:
    assert digest(folder, **changed) != digest(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_configuration_files_matter(folder: Path, name: str) -> None:
    before = digest(folder)
    (folder / name).write_text('{"patch_size": 16}')
    assert digest(folder) != before


def test_the_wire_version_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(folder)
    monkeypatch.setattr("producer.runner.fingerprint.WIRE_VERSION", 999)
    assert digest(folder) != before


# Checkpoints of other formats, and none


def test_pytorch_files_are_hashed_whole(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    before = digest(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"Weights")
    assert digest(tmp_path) != before


def test_no_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} holds no weights of an encoder"):
        digest(tmp_path)


def test_a_checkpoint_of_a_language_model_alone_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"lm.a": torch.ones(2)})
    with pytest.raises(ValueError, match="holds no weights of an encoder"):
        digest(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 100,
        (1).to_bytes(8, "little") + b"{}",
        b"",
        b"abc",
        (90).to_bytes(8, "little") + b"x" * 90,
    ],
    ids=["length too large", "length too small", "empty", "too short", "no header"],
)
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        digest(tmp_path)


@pytest.mark.parametrize("content", ["{}", "{", "[]", '{"weight_map": 1}'])
def test_an_index_that_is_none_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        digest(folder)


def test_a_file_that_breaks_off_is_named(folder: Path) -> None:
    weights = {"visual.a": torch.ones(64)}
    save_file(weights, folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        digest(folder)
