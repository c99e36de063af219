"""Compact pixels: the model gets of an image what vLLM's processor makes, bit for bit, and half of the bytes travel."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.ExifTags import Base

from producer.core import MediaItem
from tests.kit.photos import photos
from tests.unit.models import arrived, decoded_item, equal, file_item, inputs_of, model_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # torch's, of received bytes
    pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning"),
]

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
LARGE = {"size": {"shortest_edge": 3136, "longest_edge": 1 << 22}}  # the tiny models make all of these small
SIZES = [
    (224, 224),  # nothing to resize
    (448, 448),
    (1036, 1036),
    (896, 672),
    (500, 375),
    (37, 61),
    (20, 31),  # larger
    (1, 1),
    (3, 3),
    (3, 300),  # as high as there are colours
    (2600, 1900),  # smaller
    (28, 5600),  # as long as is taken
    (4000, 21),
]


@pytest.fixture(scope="module")
def worker() -> Callable[..., Any]:
    """By family and settings; made when it is first asked for."""

    made: dict[str, Any] = {}

    def make(family: str, settings: dict[str, Any] | None = None) -> Any:
        from producer.media_limits import MediaLimits
        from producer.preprocess_worker import _Worker

        if (known := made.get(f"{family} {settings}")) is not None:
            return known
        config = model_config(family, mm_processor_kwargs=settings)
        return made.setdefault(f"{family} {settings}", _Worker(config, {"image": "metadata"}, MediaLimits()))

    return make


def noise(width: int, height: int, channels: int = 3) -> Image.Image:
    values = np.random.default_rng(width * height).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values if channels > 1 else values[..., 0])


def file(image: Image.Image, kind: str = "PNG", **settings: Any) -> MediaItem:
    written = io.BytesIO()
    image.save(written, kind, **settings)
    return MediaItem(modality="image", data=written.getvalue())


def rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[Base.Orientation] = 6
    return exif


def problems(worker: Any, item: MediaItem) -> list[str]:
    """In what `item` is another than vLLM's processor makes it."""
    assert worker._cutter is not None
    media = worker._decoder.decode(item)
    wanted, found = worker._processor.process("image", media), worker.prepare(item)
    same = {
        "inputs": equal(arrived(found.inputs), inputs_of(worker._processor, "image", media)),
        "num_rows": found.num_rows == wanted.num_rows,
        "content_part": found.content_part == worker._stand_ins.part("metadata", wanted),
        "mm_hash": found.mm_hash == wanted.mm_hash,
    }
    return [name for name, is_same in same.items() if not is_same]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_of_any_size_is_what_vllm_makes_of_it(worker: Callable[..., Any], family: str) -> None:
    found = {size: problems(worker(family, LARGE), file(noise(*size))) for size in SIZES}
    assert {size: bad for size, bad in found.items() if bad} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_as_it_is_set_by_default(worker: Callable[..., Any], family: str) -> None:
    for size in ((224, 224), (500, 375), (1, 1)):
        assert problems(worker(family), file(noise(*size))) == []


KINDS = {
    "photograph": file_item(photos()["rocket.jpg"]),
    "grey": file(noise(90, 70, 1)),
    "grey JPEG": file(noise(90, 70, 1), "JPEG"),
    "black and white": file(noise(90, 70).convert("1")),
    "palette": file(noise(90, 70).convert("P")),
    "palette with transparency": file(noise(90, 70).convert("P"), transparency=3),
    "transparent": file(noise(90, 70, 4)),
    "grey and transparent": file(noise(90, 70).convert("LA")),
    "16 bits": file(Image.fromarray(np.arange(6300, dtype=np.uint16).reshape(70, 90))),
    "CMYK": file(noise(90, 70).convert("CMYK"), "JPEG"),
    "progressive": file(noise(500, 375), "JPEG", progressive=True),
    "rotated by its EXIF": file(noise(500, 375), "JPEG", exif=rotated()),
    "WebP": file(noise(90, 70), "WEBP"),
    "animated": file(noise(90, 70), "GIF", save_all=True, append_images=[noise(90, 70).rotate(90)]),
    "decoded by the client": decoded_item("image", np.asarray(noise(501, 375))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_any_kind_is_what_vllm_makes_of_it(worker: Callable[..., Any], kind: str) -> None:
    assert problems(worker("qwen2_5_vl", LARGE), KINDS[kind]) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"min_pixels": 200 * 200},
        {"max_pixels": 100 * 100},
        {"size": {"shortest_edge": 300 * 300, "longest_edge": 400 * 400}},
        {"images_kwargs": {"max_pixels": 100 * 100}},
        {"resample": 2},
    ],
    ids=str,
)
def test_settings_of_the_processor_are_followed(worker: Callable[..., Any], settings: dict[str, Any]) -> None:
    one = worker("qwen2_5_vl", settings)
    plain = arrived(worker("qwen2_5_vl").prepare(file(noise(150, 130))).inputs)
    assert not equal(arrived(one.prepare(file(noise(150, 130))).inputs), plain)  # it makes a difference
    for size in ((150, 130), (448, 448)):
        assert problems(one, file(noise(*size))) == []


def test_an_image_out_of_all_proportion_is_refused_in_the_processors_words(worker: Callable[..., Any]) -> None:
    from producer.preprocess_worker import MediaError

    one = worker("qwen2_5_vl")
    with pytest.raises(MediaError) as cut:
        one.prepare(file(noise(1, 201)))
    one._cutter, cutter = None, one._cutter
    with pytest.raises(MediaError) as processed:
        one.prepare(file(noise(1, 201)))
    one._cutter = cutter
    assert str(cut.value) == str(processed.value)
    assert "aspect ratio must be smaller than 200" in str(cut.value)


# What travels


def test_each_pixel_crosses_the_socket_once_as_a_byte_for_each_colour(worker: Callable[..., Any]) -> None:
    from producer.preprocess_worker import request
    from producer.worker_main import send

    wire = bytearray()
    send(worker("qwen2_5_vl", LARGE).answer(request(file(noise(448, 448)))), wire.extend)
    assert 448 * 448 * 3 < len(wire) < 448 * 448 * 3 + 2048


def test_images_of_one_grid_differ_in_their_pixels_alone(worker: Callable[..., Any]) -> None:
    one = worker("qwen2_5_vl", LARGE)
    left, right, other = (one.prepare(file(noise(*size))) for size in ((448, 336), (450, 337), (336, 448)))
    assert left.inputs[0] is right.inputs[0]  # made once
    assert (left.num_rows, left.content_part) == (right.num_rows, right.content_part)
    assert left.inputs[1] != right.inputs[1]
    assert other.content_part != left.content_part


def test_pixels_are_a_frame_of_their_own_whatever_vllm_is_told_of_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    from producer.media_limits import MediaLimits
    from producer.preprocess_worker import _Worker

    monkeypatch.setenv("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", str(1 << 30))
    one = _Worker(model_config("qwen2_5_vl"), {"image": "metadata"}, MediaLimits())
    assert problems(one, file(noise(56, 56))) == []


def test_nobody_is_made_to_wait_for_a_hash_that_nobody_wants() -> None:
    from producer.media_limits import MediaLimits
    from producer.preprocess_worker import make, prepared, request

    work = make(model_config("qwen2_5_vl"), {"image": "metadata"}, MediaLimits(), hashes=False)
    assert prepared(work(request(file(noise(30, 30))))).mm_hash == ""


def test_patches_are_those_of_the_image() -> None:
    from producer.cutter import cut

    patch, merge = 4, 2
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    order = [
        (row + y, column + x) for row in (0, 2) for column in (0, 2, 4) for y in range(merge) for x in range(merge)
    ]
    found = cut(pixels, patch, merge)
    assert found.shape == (len(order), 3, patch * patch)
    for one, (row, column) in zip(found, order, strict=True):
        piece = pixels[row * patch :, column * patch :][:patch, :patch]
        assert (one == piece.transpose(2, 0, 1).reshape(3, -1)).all()


# Where the processor is left to do all of it


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gemma3", {}), ("internvl", {}), ("qwen2_5_vl", {"mm_device_do_normalize": False})],
    ids=str,
)
def test_another_processor_or_setting_is_left_to_vllm(
    caplog: pytest.LogCaptureFixture, family: str, settings: dict[str, Any]
) -> None:
    from producer.cutter import find_cutter
    from producer.stand_in import Processor

    processor = Processor(model_config(family, **settings))
    caplog.clear()
    assert find_cutter(processor) is None
    assert caplog.text == ""  # it is no fault


def test_a_model_that_does_not_resize_is_left_to_vllm() -> None:
    from producer.cutter import find_cutter
    from producer.stand_in import Processor

    assert find_cutter(Processor(model_config("qwen2_5_vl", mm_processor_kwargs={"do_resize": False}))) is None


def test_an_image_that_was_left_to_vllm_is_what_vllm_makes_of_it() -> None:
    from producer.media_limits import MediaLimits
    from producer.preprocess_worker import _Worker

    config = model_config("qwen2_5_vl", mm_device_do_normalize=False)
    one, item = _Worker(config, {"image": "metadata"}, MediaLimits()), file(noise(224, 224))
    found = arrived(one.prepare(item).inputs)
    assert found["pixel_values"].dtype == config.dtype
    assert equal(found, inputs_of(one._processor, "image", one._decoder.decode(item)))


def _other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from producer import cutter

    cut = cutter.cut
    monkeypatch.setattr(cutter, "cut", lambda *args: cut(*args) ^ 1)


def _raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from producer import cutter

    monkeypatch.setattr(cutter.Cutter, "cut", lambda *_: [][0])


@pytest.mark.parametrize("change", [_other_bytes, _raises])
def test_a_cutter_that_does_not_do_what_vllm_does_is_not_used(
    change: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from producer.cutter import find_cutter
    from producer.stand_in import Processor

    processor = Processor(model_config("qwen2_5_vl"))
    assert find_cutter(processor) is not None
    change(monkeypatch)
    assert find_cutter(processor) is None
    assert "images are left to vLLM's processor" in caplog.text
