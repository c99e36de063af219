"""What stands for an item: tried on vLLM's own parser and processor, for one tiny model of each form."""

import base64
import io
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from producer.core import ContentPart, MediaItem
from producer.wire.families import EXTRA_FIELDS, embedding_width
from tests.kit.clips import sounds, videos
from tests.kit.media import Media
from tests.kit.photos import photos
from tests.unit.models import decoded_item, file_item, model_config, unsaved

MODALITIES = ("image", "video", "audio")
NONE = "the model takes none"
FORMS = {
    "qwen2_5_vl": {"image": "metadata", "video": "metadata"},
    "qwen3_vl": {"image": "metadata", "video": "metadata"},
    "internvl": {"image": "tensor"},
    "gemma3": {"image": "image"},
    "qwen2_audio": {"audio": "metadata"},
}
REASONS = {
    "qwen2_5_vl": {"audio": NONE},
    "qwen3_vl": {"audio": NONE},
    "internvl": {"video": "by metadata: vLLM declares no metadata that sizes its placeholder", "audio": NONE},
    "gemma3": {"video": NONE, "audio": NONE},
    "qwen2_audio": {"image": NONE, "video": NONE},
}
WIDTH = 128
"""Elements of a row of every tiny language model."""


@dataclass(frozen=True)
class Model:
    """One family with all that makes and tries its content parts."""

    config: Any
    decoder: Any
    processor: Any
    stand_ins: Any
    llm_only: Any
    forms: dict[str, str]
    reasons: dict[str, str]

    def process(self, item: MediaItem) -> Any:
        return self.processor.process(item.modality, self.decoder.decode(item))

    def part(self, item: MediaItem, form: str = "") -> ContentPart:
        return self.stand_ins.part(form or self.forms[item.modality], self.process(item))


@pytest.fixture(scope="module")
def model() -> Callable[[str], Model]:
    """By family; made when it is first asked for."""
    made: dict[str, Model] = {}
    return lambda family: made.get(family) or made.setdefault(family, _make(family))


def _make(family: str) -> Model:
    from producer.decode import Decoder
    from producer.stand_in import Processor, StandIns, _LlmOnly, choose_forms

    config = model_config(family)
    processor = Processor(config)
    forms, reasons = choose_forms(config, MODALITIES)
    stand_ins = StandIns(config, processor)
    return Model(config, Decoder(config), processor, stand_ins, _LlmOnly(config), forms, reasons)


def media_of(modality: str) -> list[Media]:
    found: dict[str, list[Media]] = {
        "image": list(photos().values()),
        "video": list(videos().values()),
        "audio": list(sounds().values()),
    }
    return found[modality]


def photo(name: str = "coffee.png") -> MediaItem:
    return file_item(photos()[name])


def video(name: str = "coffee-pan.mp4") -> MediaItem:
    return file_item(videos()[name])


def frames(num_frames: int, rate_hz: float) -> MediaItem:
    return decoded_item("video", np.zeros((num_frames, 112, 84, 3), np.uint8), rate_hz)


# The choice


@pytest.mark.parametrize("family", FORMS)
def test_the_first_form_that_works_is_chosen(model: Callable[[str], Model], family: str) -> None:
    assert model(family).forms == FORMS[family]
    assert model(family).reasons == REASONS[family]


@pytest.mark.parametrize("wanted", [("video",), ("audio", "image"), ()])
def test_only_what_is_wanted_is_tried(wanted: tuple[str, ...]) -> None:
    from producer.stand_in import choose_forms

    forms, reasons = choose_forms(model_config("qwen2_5_vl"), wanted)
    assert set(forms) == set(wanted) & {"image", "video"}
    assert set(reasons) == set(wanted) & {"audio"}


@pytest.mark.parametrize("family", FORMS)
def test_vllm_makes_the_same_prompt_of_every_part(model: Callable[[str], Model], family: str) -> None:
    """Not of the sample alone, with which the form was chosen."""
    one = model(family)
    for modality in one.forms:
        for media in media_of(modality):
            item = one.process(file_item(media))
            part = one.stand_ins.part(one.forms[modality], item)
            stood_for = one.llm_only.process(modality, json.loads(json.dumps(part, allow_nan=False)))
            assert stood_for.prompt == item.prompt, media.name
            assert stood_for.placeholder == item.placeholder, media.name


def test_a_form_of_another_number_of_rows_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from producer import stand_in

    def of_another_grid(self: Any, item: Any) -> ContentPart:
        fields = {f"{item.modality}_grid_thw": [1, 2, 2]}
        return {"type": f"{item.modality}_embeds", f"{item.modality}_embeds": fields}

    monkeypatch.setattr(stand_in.StandIns, "_metadata", of_another_grid)
    forms, reasons = stand_in.choose_forms(model_config("qwen2_5_vl"), ("image", "video"))
    assert forms == {"image": "image"}
    assert reasons == {"video": "by metadata: vLLM makes another prompt of it"}


def test_a_form_of_another_prompt_with_as_many_rows_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other timestamps of the same length: the placeholder is the same, the text in it is not."""
    from producer import stand_in

    metadata = stand_in.StandIns._metadata
    tried = []

    def a_second_later(self: Any, item: Any) -> ContentPart:
        part = metadata(self, item)
        times = part["video_embeds"]["timestamps"]
        part["video_embeds"]["timestamps"] = [time + 1 for time in times]
        tried.append(times)
        return part

    monkeypatch.setattr(stand_in.StandIns, "_metadata", a_second_later)
    forms, reasons = stand_in.choose_forms(model_config("qwen3_vl"), ("video",))
    assert max(tried[0]) < 9  # one digit before and after
    assert forms == {}
    assert reasons == {"video": "by metadata: vLLM makes another prompt of it"}


def test_a_form_that_fails_is_not_chosen_whatever_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from producer import stand_in

    def fail(self: Any, item: Any) -> ContentPart:
        raise ZeroDivisionError("of a model's own")

    monkeypatch.setattr(stand_in.StandIns, "_metadata", fail)
    forms, reasons = stand_in.choose_forms(model_config("qwen2_5_vl"), ("image", "video"))
    assert forms == {"image": "image"}
    assert reasons == {"video": "by metadata: of a model's own"}


def test_a_modality_whose_sample_fails_voids_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from producer import stand_in

    process = stand_in.Processor.process

    def fail_at_videos(self: Any, modality: str, media: Any) -> Any:
        if modality == "video":
            raise TypeError("of a model's own")
        return process(self, modality, media)

    monkeypatch.setattr(stand_in.Processor, "process", fail_at_videos)
    forms, reasons = stand_in.choose_forms(model_config("qwen2_5_vl"), ("image", "video"))
    assert forms == {"image": "metadata"}
    assert "of a model's own" in reasons["video"]


def test_settings_that_are_none_are_the_users_mistake() -> None:
    from producer.stand_in import choose_forms

    config = model_config("qwen2_5_vl", media_io_kwargs={"video": {"num_frames": 0}})
    with pytest.raises(ValueError, match=r"video\.num_frames is 0"):
        choose_forms(config, MODALITIES)


def test_the_models_own_settings_are_left_as_they_are() -> None:
    """The producer encodes: what it tries a form on is a copy."""
    from producer.stand_in import choose_forms

    config = model_config("qwen2_5_vl")
    before = (config.multimodal_config.enable_mm_embeds, config.multimodal_config.allow_missing_mm_embeddings)
    choose_forms(config, MODALITIES)
    after = (config.multimodal_config.enable_mm_embeds, config.multimodal_config.allow_missing_mm_embeddings)
    assert before == after == (False, False)


# Silence while trying


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_trying_is_silent_and_logging_is_on_again_afterwards(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    from producer import stand_in

    process = stand_in._LlmOnly.process
    spoke: list[bool] = []

    def listen(self: Any, modality: str, part: ContentPart) -> Any:
        spoke.append(logging.getLogger("vllm").isEnabledFor(logging.ERROR))
        if error is not None:
            raise error("no")
        return process(self, modality, part)

    monkeypatch.setattr(stand_in._LlmOnly, "process", listen)
    try:
        stand_in.choose_forms(model_config("gemma3"), ("image",))
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    assert spoke
    assert not any(spoke)
    assert logging.root.manager.disable == logging.NOTSET
    assert logging.getLogger("producer").isEnabledFor(logging.ERROR)


# Metadata


@pytest.mark.parametrize(
    ("family", "name", "grid"),
    [
        ("qwen2_5_vl", "retina.png", [1, 8, 8]),
        ("qwen2_5_vl", "coffee.png", [1, 12, 18]),
        ("qwen3_vl", "rocket.jpg", [1, 10, 16]),
    ],
)
def test_a_grid_is_plain_json(model: Callable[[str], Model], family: str, name: str, grid: list[int]) -> None:
    assert model(family).part(photo(name)) == {"type": "image_embeds", "image_embeds": {"image_grid_thw": grid}}


@pytest.mark.parametrize(
    ("item", "grid", "seconds"),
    [(video(), [4, 8, 8], 1.0), (frames(8, 4.0), [4, 8, 6], 0.5), (frames(6, 25.0), [3, 8, 6], 0.08)],
    ids=["file, sampled", "4 Hz", "25 Hz"],
)
def test_what_positions_lean_on_goes_along_as_a_tensor(
    model: Callable[[str], Model], item: MediaItem, grid: list[int], seconds: float
) -> None:
    """vLLM does not declare it, and counts every video as 2 fps without it."""
    one = model("qwen2_5_vl")
    part = one.part(item)
    fields = part["video_embeds"]
    assert part == {"type": "video_embeds", "video_embeds": fields}
    assert fields["video_grid_thw"] == grid
    assert fields.keys() == {"video_grid_thw", "second_per_grid_ts"}
    computed = one.process(item).kwargs["second_per_grid_ts"].data
    assert float(computed) == pytest.approx(seconds, rel=0.01)
    assert torch.equal(unsaved(fields["second_per_grid_ts"]), computed)
    assert torch.equal(one.llm_only.process("video", part).kwargs["second_per_grid_ts"].data, computed)


@pytest.mark.parametrize(
    ("item", "timestamps"),
    [(video(), [0.25, 1.25, 2.5, 3.5]), (frames(4, 4.0), [0.125, 0.625]), (frames(3, 1.0), [0.5, 2.0])],
    ids=["file, sampled", "4 Hz", "1 Hz"],
)
def test_timestamps_are_those_of_the_frames(
    model: Callable[[str], Model], item: MediaItem, timestamps: list[float]
) -> None:
    fields = model("qwen3_vl").part(item)["video_embeds"]
    assert fields["timestamps"] == timestamps
    assert fields["video_grid_thw"][0] == len(timestamps)


@pytest.mark.parametrize("rate_hz", [4.0, 7.0, 10.0, 29.97])
def test_timestamps_are_exact(model: Callable[[str], Model], rate_hz: float) -> None:
    """Their text is part of the prompt, to a tenth of a second: 0.45, once rounded to float32, reads 0.4, not 0.5."""
    known, item = model("qwen3_vl"), frames(8, rate_hz)
    processed = known.processor.process("video", known.decoder.decode(item))
    assert known.part(item)["video_embeds"]["timestamps"] == list(processed.kwargs["timestamps"].data)


def test_sound_is_its_number_of_rows(model: Callable[[str], Model]) -> None:
    one = model("qwen2_audio")
    for sound in sounds().values():
        item = file_item(sound)
        fields = {"audio_num_tokens": [one.process(item).num_rows]}
        assert one.part(item) == {"type": "audio_embeds", "audio_embeds": fields}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen2_audio"])
def test_pixels_and_samples_stay_here(model: Callable[[str], Model], family: str) -> None:
    """A part is small, however large the media."""
    one = model(family)
    for modality in one.forms:
        for media in media_of(modality):
            assert len(json.dumps(one.part(file_item(media)))) < 4000


def test_what_vllm_does_not_declare_is_still_not_declared(model: Callable[[str], Model]) -> None:
    """Once vLLM names it among its metadata, the table of extra fields can go."""
    one = model("qwen2_5_vl")
    assert "second_per_grid_ts" in one.process(video()).kwargs
    assert not EXTRA_FIELDS["video"] & one.processor.info.data_parser.placeholder_metadata_fields("video")


# Other forms


def test_zeros_as_many_as_the_rows_take_little_room(model: Callable[[str], Model]) -> None:
    one = model("internvl")
    sizes = set()
    for name in ("retina.png", "rocket.jpg", "coffee.png"):
        item = one.process(photo(name))
        part = one.stand_ins.part("tensor", item)
        assert part.keys() == {"type", "image_embeds"}
        assert part["type"] == "image_embeds"
        zeros = unsaved(part["image_embeds"])
        assert zeros.shape == (item.num_rows, WIDTH)
        assert zeros.dtype == one.config.dtype
        assert not zeros.any()
        assert len(part["image_embeds"]) < 2500
        sizes.add(item.num_rows)
    assert max(sizes) * WIDTH * 2 > 2500 * 4  # as a tensor of its own it would be larger


def test_a_blank_image_is_as_large_as_the_real_one(model: Callable[[str], Model]) -> None:
    one = model("gemma3")
    for found in photos().values():
        part = one.part(file_item(found))
        assert part.keys() == {"type", "image_url"}
        assert part["type"] == "image_url"
        head, _, payload = part["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        blank = Image.open(io.BytesIO(base64.b64decode(payload, validate=True)))
        assert (blank.format, blank.mode) == ("PNG", "RGB")
        assert blank.size == Image.open(io.BytesIO(found.data)).size
        assert blank.getextrema() == ((0, 0),) * 3
        assert len(payload) < len(found.data)


def test_a_decoded_image_stands_as_its_file_does(model: Callable[[str], Model]) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(photo().data)).convert("RGB"))
    for family in ("qwen2_5_vl", "internvl", "gemma3"):
        assert model(family).part(decoded_item("image", pixels)) == model(family).part(photo())


def test_metadata_that_is_not_declared_is_an_error(model: Callable[[str], Model]) -> None:
    with pytest.raises(ValueError, match="vLLM declares no metadata that sizes its placeholder"):
        model("gemma3").part(photo(), "metadata")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_embedding_does_not_stand_where_positions_follow_from_a_grid(
    model: Callable[[str], Model], family: str
) -> None:
    with pytest.raises(ValueError, match="rotary positions follow from an item's grid"):
        model(family).part(photo(), "tensor")


def test_a_form_that_is_none_is_an_error(model: Callable[[str], Model]) -> None:
    with pytest.raises(KeyError, match="nonsense"):
        model("gemma3").part(photo(), "nonsense")


# Widths


@pytest.mark.parametrize(("family", "width"), [("qwen3_vl", 3 * WIDTH), ("qwen2_5_vl", WIDTH), ("qwen2_audio", WIDTH)])
def test_rows_are_as_wide_as_the_language_model_takes_them(
    model: Callable[[str], Model], family: str, width: int
) -> None:
    one = model(family)
    assert {embedding_width(one.config, modality) for modality in one.forms} == {width}
