"""What a preprocessing process does, done in this one: hostile rates, and models whose parts are not metadata."""

import base64
import contextlib
import io
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from producer.core import MediaItem
from producer.errors import InvalidItemError
from producer.item_checks import _check_decoded
from producer.wire.contract import Reason
from producer.worker_main import Message, MessageError, receive, send
from tests.kit.clips import sounds
from tests.kit.photos import photos
from tests.unit.models import decoded_item, file_item, model_config, unsaved

Worker = Any
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # torch's resampler


@pytest.fixture(scope="module")
def worker() -> Callable[[str], Worker]:
    """By family; made when it is first asked for."""
    made: dict[str, Worker] = {}
    return lambda family: made.get(family) or made.setdefault(family, _make(family))


def _make(family: str) -> Worker:
    from producer.media_limits import MediaLimits
    from producer.preprocess_worker import _Worker
    from producer.stand_in import choose_forms

    config = model_config(family)
    return _Worker(config, choose_forms(config, ("image", "video", "audio"))[0], MediaLimits())


def sound(rate_hz: float, num_samples: int = 1600) -> MediaItem:
    return decoded_item("audio", np.zeros(num_samples, "<f4"), rate_hz)


def video(rate_hz: float) -> MediaItem:
    return decoded_item("video", np.zeros((4, 56, 84, 3), np.uint8), rate_hz)


def test_each_model_has_parts_of_its_own_form(worker: Callable[[str], Worker]) -> None:
    photo, chirp = file_item(photos()["rocket.jpg"]), file_item(sounds()["chirp.wav"])
    grid = worker("qwen2_5_vl").prepare(photo)
    assert grid.content_part["image_embeds"] == {"image_grid_thw": [1, 12, 18]}
    zeros = worker("internvl").prepare(photo)
    assert unsaved(zeros.content_part["image_embeds"]).shape == (zeros.num_rows, 128)
    blank = worker("gemma3").prepare(photo)
    payload = blank.content_part["image_url"]["url"].partition(",")[2]
    assert Image.open(io.BytesIO(base64.b64decode(payload))).size == Image.open(io.BytesIO(photo.data)).size
    heard = worker("qwen2_audio").prepare(chirp)
    assert heard.content_part["audio_embeds"] == {"audio_num_tokens": [heard.num_rows]}


@pytest.mark.parametrize(
    "item",
    [sound(16000.0), sound(8000.0), sound(44100.0), sound(16000.4)],
    ids=lambda item: f"{item.decoded.rate_hz} Hz",
)
def test_sound_of_every_usual_rate_is_heard(worker: Callable[[str], Worker], item: MediaItem) -> None:
    longer = decoded_item("audio", np.zeros(int(item.decoded.rate_hz), "<f4"), item.decoded.rate_hz)
    assert worker("qwen2_audio").prepare(longer).num_rows == 25


@pytest.mark.parametrize(
    ("family", "item"),
    [
        ("qwen2_audio", sound(0.1)),
        ("qwen2_audio", sound(5e-324)),
        ("qwen2_audio", sound(1e300)),
        ("qwen3_vl", video(1e-300)),
    ],
    ids=["0.1 Hz", "5e-324 Hz", "1e300 Hz", "video of 1e-300 Hz"],
)
def test_a_rate_that_no_device_has_is_its_senders_error(
    worker: Callable[[str], Worker], family: str, item: MediaItem
) -> None:
    from producer.preprocess_worker import MediaError

    with contextlib.suppress(InvalidItemError, MediaError):
        _check_decoded(item, item.decoded)  # as admission does before
        json.dumps(worker(family).prepare(item).content_part, allow_nan=False)


CHIRP = sounds()["chirp.wav"].data
BAD_SOUNDS = {
    "one byte": b"\0",
    "text": b"this is not a sound",
    "a path": b"/etc/passwd",
    "a photograph": photos()["rocket.jpg"].data,
    "a WAV's first bytes": CHIRP[:20],
    "a WAV without samples": CHIRP[:44],
}


@pytest.mark.parametrize("name", BAD_SOUNDS)
def test_a_bad_sound_is_its_senders_error(worker: Callable[[str], Worker], name: str) -> None:
    from producer.preprocess_worker import MediaError

    said = r"^(the audio cannot be decoded|the model's processor refuses this audio): \S"
    with pytest.raises(MediaError, match=said) as caught:
        worker("qwen2_audio").prepare(MediaItem(modality="audio", data=BAD_SOUNDS[name]))
    assert not re.search(r"0x[0-9a-f]{4,}|object at|\.py\b|(^|\s)/\w", str(caught.value), re.IGNORECASE)


@pytest.mark.parametrize("rate_hz", [0.01, 1.0, 23.976, 240.0, 1e6])
def test_a_video_of_every_rate_is_seen(worker: Callable[[str], Worker], rate_hz: float) -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        prepared = worker(family).prepare(video(rate_hz))
        assert prepared.num_rows == 2 * prepared.content_part["video_embeds"]["video_grid_thw"][1] * 6 / 4
        json.dumps(prepared.content_part, allow_nan=False)


# What a file takes


def _failing(worker: Worker, error: BaseException, monkeypatch: pytest.MonkeyPatch, *, stage: str) -> MediaItem:
    def fail(*_: Any) -> None:
        raise ValueError("the processor failed") from error

    parts = {"decode": (worker._decoder, "decode"), "cut": (worker._cutter, "cut")}
    monkeypatch.setattr(*parts[stage], fail)
    return file_item(photos()["rocket.jpg"])


@pytest.mark.parametrize("stage", ["decode", "cut"])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes"),
        Exception("OpenCV: error: (-4:Insufficient memory) Failed to allocate 432000000 bytes"),
    ],
    ids=["Python and NumPy", "PyTorch", "OpenCV"],
)
def test_a_lack_of_memory_is_seen_in_what_a_library_made_of_it(
    worker: Callable[[str], Worker], error: Exception, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from producer.preprocess_worker import MediaError

    one = worker("qwen2_5_vl")
    item = _failing(one, error, monkeypatch, stage=stage)
    with pytest.raises(MediaError, match=r"^the image takes more memory to decode and preprocess than") as caught:
        one.prepare(item)
    assert caught.value.reason is Reason.MEDIA_TOO_LARGE


def test_other_failures_are_not_a_lack_of_memory(
    worker: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    from producer.preprocess_worker import MediaError

    one = worker("qwen2_5_vl")
    item = _failing(one, KeyError("memory"), monkeypatch, stage="cut")
    with pytest.raises(MediaError, match=r"^the model's processor refuses this image: the processor failed") as caught:
        one.prepare(item)
    assert caught.value.reason is Reason.MEDIA_UNREADABLE


# What goes to a process, and comes back


@pytest.mark.parametrize("item", [file_item(photos()["rocket.jpg"]), video(0.1), sound(16000.0)], ids=type)
def test_an_item_arrives_as_it_was_sent(item: MediaItem) -> None:
    from producer.preprocess_worker import _item, request

    wire = bytearray()
    send(request(item), wire.extend)
    assert _item(receive(_reader(wire), 1 << 30)) == item


def test_an_answer_arrives_as_it_was_made(worker: Callable[[str], Worker]) -> None:
    from producer.preprocess_worker import prepared, request

    one, item, wire = worker("qwen2_5_vl"), file_item(photos()["rocket.jpg"]), bytearray()
    send(one.answer(request(item)), wire.extend)
    came, made = prepared(receive(_reader(wire), 1 << 30)), one.prepare(item)
    assert (came.mm_hash, came.num_rows, came.content_part) == (made.mm_hash, made.num_rows, made.content_part)
    assert came.inputs == [bytearray(frame) for frame in made.inputs]


def _reader(wire: bytearray) -> Callable[[bytearray], None]:
    file = io.BytesIO(wire)

    def fill(buffer: bytearray) -> None:
        assert file.readinto(buffer) == len(buffer)

    return fill


GOOD = {"mm_hash": "ab", "num_rows": 1, "content_part": {}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        GOOD | {"mm_hash": None},
        GOOD | {"num_rows": "1"},
        GOOD | {"num_rows": -1},
        GOOD | {"num_rows": True},
        GOOD | {"content_part": []},
        {"refused": "SHUTTING_DOWN", "why": "?"},
        {"refused": "MEDIA_UNREADABLE", "why": 1},
        {"refused": []},
    ],
    ids=str,
)
def test_what_is_no_answer_is_not_believed(fields: dict[str, Any]) -> None:
    from producer.preprocess_worker import prepared

    prepared(Message(fields=GOOD))
    with pytest.raises(MessageError):
        prepared(Message(fields=fields))


@pytest.mark.parametrize("reason", [Reason.MEDIA_UNREADABLE, Reason.MEDIA_TOO_LARGE])
def test_a_refusal_is_its_files_error(reason: Reason) -> None:
    from producer.preprocess_worker import MediaError, prepared

    with pytest.raises(MediaError, match=r"^why$") as caught:
        prepared(Message(fields={"refused": reason.value, "why": "why"}))
    assert caught.value.reason is reason
