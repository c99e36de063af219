"""What the encoder finds out before it loads any weights: what of a model can be served, and which settings count."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from producer.errors import UnsupportedModelError
from tests.kit.checkpoints import cached_checkpoint

MODALITIES = ("image", "video", "audio")


def encoder(model: str, modalities: Sequence[str] = MODALITIES, **settings: Any) -> Any:
    from producer.runner.encoder import VllmEncoder  # here, since it takes seconds

    values: dict[str, Any] = {
        "dtype": "auto",
        "mm_encoder_attn_backend": "auto",
        "revision": "",
        "trust_remote_code": False,
        "mm_processor_kwargs": {},
        "media_io_kwargs": {},
    }
    return VllmEncoder(model=model, modalities=modalities, **{**values, **settings})


def tiny(family: str) -> str:
    return str(cached_checkpoint(family))


@pytest.mark.parametrize(
    ("family", "forms"),
    [
        ("qwen3_vl", {"image": "metadata", "video": "metadata"}),
        ("gemma3", {"image": "image"}),
        ("qwen2_audio", {"audio": "metadata"}),
    ],
)
def test_what_can_be_served_is_known_before_weights_are_loaded(family: str, forms: dict[str, str]) -> None:
    assert encoder(tiny(family)).forms == forms


def test_what_is_served_and_what_is_not_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "producer.runner.encoder"):
        encoder(tiny("internvl"))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "producer.runner.encoder"]
    assert "(InternVLForConditionalGeneration): image by tensor; no video: by metadata: vLLM declares no" in line
    assert "no audio: the model takes none" in line


def test_a_model_of_which_nothing_can_be_served_is_named_with_the_reasons() -> None:
    said = r"model \S*qwen2_audio\S* \(Qwen2AudioForConditionalGeneration\) cannot be served to an LLM-only vLLM; "
    with pytest.raises(UnsupportedModelError, match=said + "no image: the model takes none; no video: the model takes"):
        encoder(tiny("qwen2_audio"), ("image", "video"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "video.num_frames is 0; a video needs a bound"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [1]}}}, "rgba_background_color must be"),
        ({"media_io_kwargs": {"audio": {"audio_backend": "x"}}}, "Unknown audio_backend 'x'"),
        ({"media_io_kwargs": {"video": 5}}, "media_io_kwargs.video: Input should be a valid dictionary"),
    ],
    ids=str,
)
def test_settings_that_vllm_does_not_take_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        encoder(tiny("qwen2_5_vl"), **settings)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="there is no such folder"):
        encoder(str(tmp_path / "absent"))


def test_all_settings_for_media_are_part_of_the_fingerprint() -> None:
    processing, decoding = {"size": {"shortest_edge": 3136, "longest_edge": 12544}}, {"video": {"fps": 1}}
    found = encoder(tiny("qwen2_5_vl"), mm_processor_kwargs=processing, media_io_kwargs=decoding)
    assert found._fingerprint_settings() == {
        "mm_processor_kwargs": processing,
        "media_io_kwargs": decoding,
        "dtype": "bfloat16",
        "fidelity": "fast",
        "compile_mm_encoder": False,
        "video_loader": "opencv",
    }
    assert decoding == {"video": {"fps": 1}}  # vLLM's decoders take more out of it


@pytest.mark.parametrize("settings", [{"fidelity": "exact"}, {"compile_mm_encoder": True}], ids=str)
def test_what_changes_the_last_bits_is_part_of_the_fingerprint(settings: dict[str, Any]) -> None:
    changed, plain = encoder(tiny("qwen2_5_vl"), **settings), encoder(tiny("qwen2_5_vl"))
    found, usual = changed._fingerprint_settings(), plain._fingerprint_settings()
    assert {name: value for name, value in found.items() if usual[name] != value} == settings
    assert (changed.is_exact, plain.is_exact) == ("fidelity" in settings, False)


def test_one_that_was_not_loaded_can_be_closed() -> None:
    """As at a start whose loading fails, which must end the process group."""
    encoder(tiny("qwen2_5_vl")).close()
