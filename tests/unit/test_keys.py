"""Whenever what the encoder computes from differs, the key differs: over real files, forms and settings.

Only so is an embedding found under a key the one that was asked for. The other way round is not promised: a PNG and a
BMP of the same pixels have two keys.
"""

import hashlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from producer.core import MediaItem
from producer.runner.fingerprint import fingerprint
from producer.wire.content_key import content_key
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.clips import sounds, videos
from tests.kit.photos import photos, scaled_photo
from tests.unit.models import decoded_item, file_item

PHOTO = scaled_photo("coffee.png", 196)
ORIENTATION = 0x0112
Setting = tuple[dict[str, Any], dict[str, Any]]
"""`mm_processor_kwargs` and `media_io_kwargs`."""
SMALL = {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 16}}
LARGE = {"size": {"shortest_edge": 28 * 28 * 50, "longest_edge": 28 * 28 * 64}}
"""In pixels."""
IMAGE_SETTINGS: list[Setting] = [
    ({}, {}),
    (SMALL, {}),
    (LARGE, {}),
    ({}, {"image": {"rgba_background_color": [0, 0, 0]}}),
    ({}, {"image": {"rgba_background_color": [0, 0, 255]}}),
    ({}, {"image": {"image_mode": "RGB"}}),
    (SMALL, {"image": {"rgba_background_color": [0, 0, 0]}}),
]
VIDEO_SETTINGS: list[Setting] = [
    ({}, {}),
    ({}, {"video": {"fps": 1}}),
    ({}, {"video": {"fps": 4}}),
    ({}, {"video": {"max_frames": 4}}),
    ({}, {"video": {"video_backend": "opencv", "num_frames": 5}}),
    (SMALL, {}),
]


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> MediaItem:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return MediaItem(modality="image", data=file.getvalue())


def turned(orientation: int) -> MediaItem:
    """The photograph in a file that says how its camera was held."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(PHOTO, "JPEG", exif=exif)


def see_through() -> Image.Image:
    """A quarter of the photograph lets the background through, another one does by half."""
    picture = PHOTO.convert("RGBA")
    alpha = Image.new("L", picture.size, 255)
    alpha.paste(0, (0, 0, 98, 70))
    alpha.paste(128, (98, 0, 196, 70))
    picture.putalpha(alpha)
    return picture


def image_items() -> Iterator[MediaItem]:
    yield from map(file_item, photos().values())
    yield from (encoded(PHOTO.resize(size)) for size in ((196, 147), (195, 147), (147, 196), (98, 74), (112, 112)))
    yield from (encoded(PHOTO.convert(mode)) for mode in ("L", "1", "P", "I;16", "RGBA", "LA"))
    yield from (
        encoded(PHOTO.convert(mode), kind) for mode, kind in (("CMYK", "JPEG"), ("RGB", "WEBP"), ("RGB", "BMP"))
    )
    yield from (encoded(PHOTO, "JPEG", quality=quality) for quality in (20, 90))
    yield from map(turned, range(1, 9))
    yield encoded(see_through())
    yield encoded(see_through().convert("P"))
    pixels = np.asarray(PHOTO.resize((196, 98)))
    yield decoded_item("image", pixels)
    yield decoded_item("image", pixels.reshape(196, 98, 3))  # the same bytes
    yield decoded_item("image", pixels.reshape(49, 392, 3))


def video_items() -> Iterator[MediaItem]:
    yield from map(file_item, videos().values())
    frames = np.stack([np.asarray(PHOTO.resize((112, 84)).rotate(angle)) for angle in range(0, 40, 5)])
    for rate_hz in (1.0, 2.0, 2.5):
        yield decoded_item("video", frames, rate_hz)
    yield decoded_item("video", frames[::-1], 2.0)
    yield decoded_item("video", frames.reshape(8, 112, 84, 3), 2.0)
    yield decoded_item("video", frames.reshape(4, 168, 112, 3), 2.0)
    yield decoded_item("video", frames.reshape(16, 42, 112, 3), 2.0)


def audio_items() -> Iterator[MediaItem]:
    yield from map(file_item, sounds().values())
    samples = np.sin(np.arange(16000, dtype="<f4") / 20)
    yield decoded_item("audio", samples, 16000.0)
    yield decoded_item("audio", samples[::-1], 16000.0)
    yield decoded_item("audio", samples[:-1], 16000.0)
    yield decoded_item("audio", samples, 8000.0)


class Producer:
    """One producer's keys, and what its encoder would get."""

    def __init__(self, family: str, setting: Setting) -> None:
        from producer.decode import MODALITIES
        from producer.media_limits import MediaLimits
        from producer.preprocess_worker import _Worker
        from producer.runner.encoder import VllmEncoder

        processing, decoding = setting
        encoder = VllmEncoder(
            model=str(cached_checkpoint(family)),
            dtype="auto",
            mm_encoder_attn_backend="auto",
            revision="",
            trust_remote_code=False,
            mm_processor_kwargs=processing,
            media_io_kwargs=decoding,
            modalities=MODALITIES,
        )
        self._worker = _Worker(encoder.model_config, encoder.forms, MediaLimits())
        self._fingerprint = fingerprint(encoder._folder(), lambda name: True, encoder._fingerprint_settings())

    def key(self, item: MediaItem) -> str:
        form = None if item.decoded is None else (item.decoded.shape, item.decoded.rate_hz)
        return content_key(self._fingerprint, item.modality, item.data, form)

    def inputs(self, item: MediaItem) -> str:
        digest = hashlib.sha256()
        for frame in self._worker.prepare(item).inputs:
            digest.update(len(frame).to_bytes(8, "little") + frame)
        return digest.hexdigest()


def inputs_by_key(family: str, settings: list[Setting], items: list[MediaItem]) -> dict[str, set[str]]:
    """Inputs of the encoder under each key, over every setting, with a second producer of the first one."""
    found: dict[str, set[str]] = {}
    for producer in [Producer(family, setting) for setting in [*settings, settings[0]]]:
        for item in items:
            found.setdefault(producer.key(item), set()).add(producer.inputs(item))
    return found


@pytest.mark.parametrize(
    ("family", "settings", "items", "num_inputs"),
    [
        ("qwen2_5_vl", IMAGE_SETTINGS, image_items, 100),
        ("qwen2_5_vl", VIDEO_SETTINGS, video_items, 15),
        ("qwen2_audio", [({}, {})], audio_items, 6),
    ],
    ids=["images", "videos", "sounds"],
)
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # torchaudio's resampler
def test_other_inputs_have_another_key(family: str, settings: list[Setting], items: Any, num_inputs: int) -> None:
    tried = list(items())
    found = inputs_by_key(family, settings, tried)
    assert [key for key, inputs in found.items() if len(inputs) > 1] == []
    assert len(found) == len(tried) * len(settings)  # no two share a key
    assert len(set().union(*found.values())) >= num_inputs  # else there would be little to tell apart


def test_settings_in_another_order_are_the_same() -> None:
    edges = SMALL["size"]
    one = Producer("qwen2_5_vl", (SMALL, {}))
    other = Producer("qwen2_5_vl", ({"size": dict(reversed(edges.items()))}, {}))
    item = encoded(PHOTO)
    assert one.key(item) == other.key(item)
    assert one.inputs(item) == other.inputs(item)
