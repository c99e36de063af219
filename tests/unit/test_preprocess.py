"""Preprocessing with vLLM's own decoder and processor, in real processes, on real media and hostile files."""

import asyncio
import io
import os
import re
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from producer.core import MediaItem, PreparedItem
from producer.errors import InternalError, InvalidItemError, ServiceError, UnavailableError
from producer.metrics import Metrics
from producer.preprocess import Preprocessor
from producer.wire.contract import Reason
from tests.kit.clips import videos
from tests.kit.photos import photos
from tests.unit.conftest import sample
from tests.unit.models import decoded_item, file_item, pixels_of
from tests.unit.models import model_config as model_config_of

KEY = "ab" * 32
GOOD, GOOD_ROWS = photos()["retina.png"].data, 16
MAX_ROWS = 60
WAIT_S = 120.0
METRICS = Metrics()
"""Of `roomy`."""
FORMS = {"image": "metadata", "video": "metadata"}
LEAK = re.compile(r"0x[0-9a-f]{4,}|object at|(^|\s)/\w|\\x|\.py\b", re.IGNORECASE)
"""What a client must not read: an address, a path, raw bytes."""


@pytest.fixture(scope="module")
def model_config() -> Any:
    return model_config_of("qwen2_5_vl")


@pytest.fixture(scope="module")
def preprocessor(model_config: Any) -> Iterator[Preprocessor]:
    """One process, with little memory; starting it takes seconds."""
    preprocessor = Preprocessor(model_config, FORMS, 1, max_rows=MAX_ROWS, memory_bytes=256 << 20, metrics=Metrics())
    preprocessor.start()
    yield preprocessor
    preprocessor.close()


@pytest.fixture(scope="module")
def roomy(model_config: Any) -> Iterator[Preprocessor]:
    """One process, with enough memory for `SLOW`."""
    preprocessor = Preprocessor(model_config, FORMS, 1, max_rows=MAX_ROWS, metrics=METRICS)
    preprocessor.start()
    yield preprocessor
    preprocessor.close()


async def prepare(preprocessor: Preprocessor, data: bytes) -> PreparedItem:
    return await preprocessor.prepare(KEY, MediaItem(modality="image", data=data))


def picture(mode: str = "RGB", size: tuple[int, int] = (112, 112), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


BOMB = picture("1", (9_900, 9_900))
"""Just small enough for the decoder: a few KB that become 300 MB."""
SLOW = picture("1", (6_000, 6_000))
"""Takes half a second at least."""


async def ready(preprocessor: Preprocessor, *, but: set[int] | None = None) -> int:
    """Process id of the process that is ready, once it is none of `but`."""
    for _ in range(int(WAIT_S * 100)):
        if pids := preprocessor.pids - (but or set()):
            return pids.pop()
        await asyncio.sleep(0.01)
    raise AssertionError("no process is ready")


# Pictures


@pytest.mark.parametrize(
    ("name", "grid"),
    [("retina.jpg", (1, 8, 8)), ("retina.png", (1, 8, 8)), ("coffee.png", (1, 12, 18)), ("rocket.jpg", (1, 12, 18))],
)
async def test_a_photograph_becomes_rows_and_what_stands_for_it(
    preprocessor: Preprocessor, name: str, grid: tuple[int, int, int]
) -> None:
    item = await prepare(preprocessor, photos()[name].data)
    assert (item.key, item.modality) == (KEY, "image")
    assert item.content_part == {"type": "image_embeds", "image_embeds": {"image_grid_thw": list(grid)}}
    assert item.num_rows == grid[0] * grid[1] * grid[2] // 4
    num_bytes = item.num_rows * 4 * 14 * 14 * 3  # each pixel once, as a byte for each colour
    assert num_bytes < sum(len(frame) for frame in item.inputs) < num_bytes + 1024


async def test_the_same_file_becomes_the_same_inputs(preprocessor: Preprocessor) -> None:
    first, second = [await prepare(preprocessor, photos()["chelsea.jpg"].data) for _ in range(2)]
    other = await prepare(preprocessor, photos()["chelsea.png"].data)
    assert first.inputs == second.inputs
    assert first.inputs != other.inputs


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("1", "PNG"), ("I;16", "PNG"), ("CMYK", "JPEG"), ("RGB", "WEBP")],
)
async def test_other_kinds_of_picture_are_read(preprocessor: Preprocessor, mode: str, kind: str) -> None:
    assert (await prepare(preprocessor, picture(mode, kind=kind))).num_rows == 16


# Other media


async def test_a_video_becomes_rows_and_what_stands_for_it(preprocessor: Preprocessor) -> None:
    item = await preprocessor.prepare(KEY, file_item(videos()["rocket-zoom.mp4"]))
    assert (item.key, item.modality, item.num_rows) == (KEY, "video", 36)
    assert item.content_part["type"] == "video_embeds"
    assert item.content_part["video_embeds"]["video_grid_thw"] == [3, 6, 8]
    assert sum(len(frame) for frame in item.inputs) > 36 * 4 * 14 * 14 * 2 * 3


async def test_what_a_client_decoded_becomes_the_same_as_its_file(preprocessor: Preprocessor) -> None:
    file = await prepare(preprocessor, photos()["rocket.jpg"].data)
    pixels = decoded_item("image", pixels_of(photos()["rocket.jpg"].data))
    decoded = await preprocessor.prepare(KEY, pixels)
    assert (decoded.inputs, decoded.content_part, decoded.num_rows) == (file.inputs, file.content_part, file.num_rows)
    frames = np.stack([pixels_of(GOOD)] * 4)
    video = await preprocessor.prepare(KEY, decoded_item("video", frames, 2.0))
    assert (video.modality, video.num_rows) == ("video", 32)


# Files at fault


def png_of(width: int, height: int) -> bytes:
    """A PNG that says how large it is, and holds no picture."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


PHOTO = photos()["astronaut.png"].data
JPEG = photos()["astronaut.jpg"].data
BAD_FILES = {
    "one byte": b"\0",
    "text": b"this is not an image",
    "a path": b"/etc/passwd",
    "a URL": b"https://example.com/cat.png",
    "a web page": b"<!doctype html><html><body>404 Not Found</body></html>",
    "half a PNG": PHOTO[: len(PHOTO) // 2],
    "half a JPEG": JPEG[: len(JPEG) // 2],
    "a PNG's signature": PHOTO[:8],
    "a JPEG's first bytes": JPEG[:20],
    "a PNG without a picture": png_of(10, 10),
    "a decompression bomb": png_of(60_000, 60_000),
    "a PNG with a JPEG's first bytes": JPEG[:10] + PHOTO[10:],
    "a broken PNG": PHOTO[:2000] + bytes(500) + PHOTO[2500:],
    "video": b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(100),
    "a picture of no height": png_of(10, 0),
    "a strip that the processor refuses": picture(size=(2000, 1)),
}


async def refusal(preprocessor: Preprocessor, modality: str, data: bytes) -> str:
    """What the sender of a bad file reads."""
    with pytest.raises(InvalidItemError) as caught:
        await preprocessor.prepare(KEY, MediaItem(modality=modality, data=data))
    assert caught.value.reason is Reason.MEDIA_UNREADABLE
    message = str(caught.value)
    said = rf"(the {modality} cannot be decoded|the model's processor refuses this {modality}): \S"
    assert re.match(said, message), message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", BAD_FILES)
async def test_a_bad_file_is_its_senders_error(preprocessor: Preprocessor, name: str) -> None:
    message = await refusal(preprocessor, "image", BAD_FILES[name])
    assert not LEAK.search(message), message


VIDEO = videos()["coffee-pan.mp4"].data
BAD_VIDEOS = {
    "one byte": b"\0",
    "text": b"this is not a video",
    "a path": b"/etc/passwd",
    "a playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
    "a photograph": JPEG,
    "an MP4's first bytes": VIDEO[:40],
    "half an MP4": VIDEO[: len(VIDEO) // 2],
    "an MP4 without frames": b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(100),
}


@pytest.mark.parametrize("name", BAD_VIDEOS)
async def test_a_bad_video_is_its_senders_error(preprocessor: Preprocessor, name: str) -> None:
    message = await refusal(preprocessor, "video", BAD_VIDEOS[name])
    assert not LEAK.search(message), message


@pytest.mark.parametrize("name", ["coffee.jpg", "coffee.png"])
async def test_a_mislabelled_picture_is_read_by_its_bytes(preprocessor: Preprocessor, name: str) -> None:
    """Items carry no label at all: a JPEG sent as `photo.png` is a JPEG."""
    assert (await prepare(preprocessor, photos()[name].data)).num_rows == 54


async def test_too_many_rows_are_refused(preprocessor: Preprocessor) -> None:
    with pytest.raises(InvalidItemError, match="the image needs 64 rows; at most 60 are allowed") as caught:
        await prepare(preprocessor, picture(size=(224, 224)))
    assert caught.value.reason is Reason.MEDIA_TOO_LARGE


async def test_bad_files_leave_the_process_running(preprocessor: Preprocessor) -> None:
    await prepare(preprocessor, GOOD)
    before = preprocessor.pids
    for data in BAD_FILES.values():
        with pytest.raises(InvalidItemError):
            await prepare(preprocessor, data)
    assert preprocessor.pids == before


# Processes that die


async def outcome_of_deaths(preprocessor: Preprocessor, *numbers: signal.Signals) -> ServiceError | PreparedItem:
    """What becomes of a file whose processes get these signals, one after the other, while they decode it."""
    seen: set[int] = set()
    waiting = asyncio.create_task(prepare(preprocessor, SLOW))
    for number in numbers:
        pid = await ready(preprocessor, but=seen)
        await asyncio.sleep(0.05)  # it takes the file as soon as it is ready
        seen.add(pid)
        os.kill(pid, number)
    try:
        return await asyncio.wait_for(waiting, WAIT_S)
    except ServiceError as error:
        return error


async def test_a_file_that_crashes_its_decoder_is_refused(roomy: Preprocessor) -> None:
    error = await outcome_of_deaths(roomy, signal.SIGSEGV, signal.SIGABRT)
    assert isinstance(error, InvalidItemError)
    assert error.reason is Reason.MEDIA_CRASHES_DECODER
    assert str(error) == "the process that decoded this image died, twice; the file is refused"
    assert (await prepare(roomy, GOOD)).num_rows == GOOD_ROWS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_file_whose_process_dies_once_is_tried_again(roomy: Preprocessor, number: signal.Signals) -> None:
    error = await outcome_of_deaths(roomy, number)
    assert str(error) == "the image needs 64 rows; at most 60 are allowed"  # it was decoded


async def test_a_file_whose_processes_are_killed_is_not_at_fault(roomy: Preprocessor) -> None:
    error = await outcome_of_deaths(roomy, signal.SIGKILL, signal.SIGKILL)
    assert isinstance(error, InternalError)
    assert error.reason is Reason.WORKER_DIED
    assert (await prepare(roomy, GOOD)).num_rows == GOOD_ROWS


async def test_a_stopped_process_is_replaced(roomy: Preprocessor) -> None:
    stopped = await ready(roomy)
    os.kill(stopped, signal.SIGSTOP)
    assert (await asyncio.wait_for(prepare(roomy, GOOD), WAIT_S)).num_rows == GOOD_ROWS
    assert stopped not in roomy.pids
    assert roomy.down_reason() is None


async def test_an_idle_process_that_dies_is_replaced(roomy: Preprocessor) -> None:
    dead = await ready(roomy)
    os.kill(dead, signal.SIGSEGV)
    await ready(roomy, but={dead})
    assert (await asyncio.wait_for(prepare(roomy, GOOD), WAIT_S)).num_rows == GOOD_ROWS


# Time and memory


async def test_what_waits_is_not_counted_as_preprocessed(roomy: Preprocessor) -> None:
    await ready(roomy)
    before_s, began_s = sample(METRICS, "stage_seconds_sum", stage="preprocess"), time.perf_counter()
    _, good = await asyncio.gather(prepare(roomy, SLOW), prepare(roomy, GOOD), return_exceptions=True)
    worked_s = sample(METRICS, "stage_seconds_sum", stage="preprocess") - before_s
    assert isinstance(good, PreparedItem)
    assert good.waited_s > 0.1  # what the one before it takes at least
    assert worked_s < time.perf_counter() - began_s + good.waited_s / 2


async def test_its_processes_are_counted(roomy: Preprocessor) -> None:
    dead, deaths = await ready(roomy), sample(METRICS, "preprocess_deaths_total")
    assert sample(METRICS, "preprocess_workers") == 1
    os.kill(dead, signal.SIGKILL)
    await ready(roomy, but={dead})
    assert sample(METRICS, "preprocess_deaths_total") == deaths + 1


async def test_a_file_that_takes_too_long_is_refused(model_config: Any) -> None:
    preprocessor = Preprocessor(model_config, FORMS, 1, max_rows=MAX_ROWS, timeout_s=0.1, metrics=Metrics())
    try:
        with pytest.raises(InvalidItemError, match=r"the image took more than 0\.1 s to decode") as caught:
            await asyncio.wait_for(prepare(preprocessor, SLOW), WAIT_S)
    finally:
        preprocessor.close()
    assert caught.value.reason is Reason.MEDIA_TOO_SLOW


async def test_a_file_that_takes_too_much_memory_is_refused_and_the_process_goes_on(preprocessor: Preprocessor) -> None:
    before = await ready(preprocessor)
    with pytest.raises(InvalidItemError, match=r"the image takes more memory .* than is allowed") as caught:
        await prepare(preprocessor, BOMB)
    assert caught.value.reason is Reason.MEDIA_TOO_LARGE
    assert (await prepare(preprocessor, GOOD)).num_rows == GOOD_ROWS
    assert preprocessor.pids == {before}


# The end


async def test_a_closed_pool_is_an_error_not_a_hang(model_config: Any) -> None:
    preprocessor = Preprocessor(model_config, FORMS, 1, max_rows=MAX_ROWS, metrics=Metrics())
    preprocessor.close()
    with pytest.raises(UnavailableError) as caught:
        await asyncio.wait_for(prepare(preprocessor, GOOD), WAIT_S)
    assert caught.value.reason is Reason.SHUTTING_DOWN


def test_it_is_done_without_an_event_loop(preprocessor: Preprocessor) -> None:
    """What follows is begun on the thread that has the answer; an error has its reason there, too."""
    threads: list[str] = []
    good = preprocessor.submit(KEY, MediaItem(modality="image", data=GOOD))
    good.add_done_callback(lambda _: threads.append(threading.current_thread().name))
    assert good.result(WAIT_S).num_rows == GOOD_ROWS
    with pytest.raises(InvalidItemError):
        preprocessor.submit(KEY, MediaItem(modality="image", data=b"no image")).result(WAIT_S)
    assert threads == ["worker-0"]


async def test_a_pool_that_is_down_says_so_at_once(model_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preprocessor = Preprocessor(model_config, FORMS, 1, max_rows=MAX_ROWS, metrics=Metrics())
    monkeypatch.setattr(preprocessor, "down_reason", lambda: "no worker has been ready for 9 s")
    with pytest.raises(UnavailableError, match="preprocessing is down: no worker has been ready for 9 s"):
        await prepare(preprocessor, GOOD)
