"""Media files through what a preprocessing process does with them: vLLM's decoders, then a model's processor.

A file ends in inputs or in a MediaError. Coverage is that of Python code: ours and Pillow's formats.
"""

import contextlib
import io
import os
import wave
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import cv2
import numpy as np
from PIL import Image

from producer.core import DecodedForm, MediaItem
from producer.errors import InvalidItemError
from producer.item_checks import ItemChecks
from tests.fuzz.checks import check_said, expect
from tests.fuzz.mutate import AnyBytes, media_file
from tests.kit.photos import scaled_photo

_KINDS = ("image", "video", "audio")
_MAX_GROWTH_MB = 3072
"""Most memory that one file may take beside the libraries, which have the rest of 4 GiB."""
_CHECKS = ItemChecks(modalities=_KINDS, max_item_bytes=1 << 20)


class _Process:
    """A preprocessing process's worker, in this process."""

    def __init__(self) -> None:
        from producer import preprocess_worker
        from producer.media_limits import MediaLimits
        from tests.unit.models import model_config

        Image.init()  # now, so that the formats are instrumented
        forms = {"image": "metadata", "video": "metadata"}
        self._error = preprocess_worker.MediaError
        self._worker = preprocess_worker._Worker(model_config("qwen2_5_vl"), forms, MediaLimits())
        self._for_sender = preprocess_worker._for_sender

    def prepare(self, item: MediaItem, data: bytes) -> None:
        try:
            if item.modality == "audio":  # the model takes none; the decoder is for every model
                self._decode(item)
                return
            prepared = self._worker.prepare(item)
        except self._error as error:
            check_said(str(error), data)
            return
        expect(prepared.num_rows >= 1 and prepared.inputs, "a file gives no inputs")
        expect(len(prepared.mm_hash) >= 32, "a file has no hash")

    def _decode(self, item: MediaItem) -> None:
        try:
            samples, rate_hz = self._worker._decoder.decode(item)
        except Exception as error:  # as the worker does
            raise self._error(self._for_sender("the audio cannot be decoded", error)) from None
        expect(samples.ndim <= 2 and rate_hz > 0, f"samples are of {samples.ndim} dimensions at {rate_hz} Hz")


_process: Any = None


def target(data: bytes) -> None:
    """Modality, whether it was decoded by its client, then the file; or three numbers of a shape, then pixels."""
    global _process
    _process = _process or _Process()
    if len(data) < 2:
        return
    item = _item(_KINDS[data[0] % len(_KINDS)], data[1] % 2 == 1, data[2:])
    try:
        _CHECKS.check(item)
    except InvalidItemError as error:
        check_said(str(error), data)
        return
    with _in_bounds():
        _process.prepare(item, data)


def _item(modality: str, is_decoded: bool, data: bytes) -> MediaItem:
    if not is_decoded or len(data) < 3:
        return MediaItem(modality=modality, data=data)
    (a, b, c), values = data[:3], data[3:]
    shape = {"image": (a, b, 3), "video": (a, b, c, 3), "audio": (len(values) // 4,)}[modality]
    rate_hz = {"image": 0.0, "video": 1.0 + c / 8, "audio": 8000.0}[modality]
    return MediaItem(modality=modality, data=values, decoded=DecodedForm(shape=shape, rate_hz=rate_hz))


@contextlib.contextmanager
def _in_bounds() -> Iterator[None]:
    """The file may not take more memory than it may, nor leave descriptors open."""
    num_open = len(os.listdir("/proc/self/fd"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before_mb = _memory_mb("VmRSS")
    yield
    growth_mb = _memory_mb("VmHWM") - before_mb
    expect(growth_mb <= _MAX_GROWTH_MB, f"a file takes {growth_mb} MB")
    expect(len(os.listdir("/proc/self/fd")) <= num_open + 8, "a file leaves descriptors open")


def _memory_mb(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) >> 10


def mutate(data: bytes, most: int, dice: Random, any_bytes: AnyBytes) -> bytes:
    """The two bytes in front are changed now and then."""
    head = bytearray(data[:2].ljust(2, b"\0"))
    if dice.random() < 0.03:
        head[dice.randrange(2)] = dice.randrange(3)
    return bytes(head) + media_file(data[2:] or b"\0", most - 2, dice, any_bytes)


def seeds() -> dict[str, bytes]:
    """A small file of each format that clients send; scenes of a few pixels where a photograph is too large."""
    picture = scaled_photo("coffee.png", 24)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "jpeg": ("JPEG", {"quality": 30}),
        "progressive": ("JPEG", {"quality": 30, "progressive": True}),
        "png": ("PNG", {}),
        "gif": ("GIF", {"save_all": True, "append_images": [picture.rotate(90)]}),
        "webp": ("WEBP", {}),
        "bmp": ("BMP", {}),
        "tiff": ("TIFF", {"compression": "tiff_lzw"}),
        "ico": ("ICO", {"sizes": [(16, 16)]}),
        "ppm": ("PPM", {}),
        "qoi": ("QOI", {}),
        "jpeg2000": ("JPEG2000", {}),
        "avif": ("AVIF", {"quality": 20}),
        "tga": ("TGA", {}),
        "pcx": ("PCX", {}),
    }
    files = {name: b"\0\0" + _saved(picture, kind, settings) for name, (kind, settings) in kinds.items()}
    orientation = Image.Exif()
    orientation[0x0112] = 6
    files["exif"] = b"\0\0" + _saved(picture, "JPEG", {"quality": 30, "exif": orientation})
    files["palette"] = b"\0\0" + _saved(picture.convert("P"), "PNG", {"transparency": 3})
    files["cmyk"] = b"\0\0" + _saved(picture.convert("CMYK"), "JPEG", {"quality": 30})
    files["grey16"] = b"\0\0" + _saved(picture.convert("I;16"), "PNG", {})
    files["pixels"] = b"\0\1" + bytes([24, 32, 0]) + bytes(24 * 32 * 3)
    files["frames"] = b"\1\1" + bytes([2, 16, 16]) + bytes(2 * 16 * 16 * 3)
    files["samples"] = b"\2\1" + bytes(3) + bytes(400)
    files["mp4"] = b"\1\0" + _video("clip.mp4", "mp4v")
    files["avi"] = b"\1\0" + _video("clip.avi", "MJPG")
    files["wav"] = b"\2\0" + _wave()
    return {name: data for name, data in files.items() if len(data) <= 4096}


def _saved(picture: Image.Image, kind: str, settings: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **settings)
    return file.getvalue()


def _video(name: str, codec: str) -> bytes:
    """Four frames of 32×32."""
    import tempfile

    frames = np.random.default_rng(0).integers(0, 255, (4, 1, 1, 3), np.uint8).repeat(32, 1).repeat(32, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), 2.0, (32, 32))
        for frame in frames:
            writer.write(frame)
        writer.release()
        return path.read_bytes()


def _wave() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 8000, 800, "NONE", ""))
        sound.writeframes((np.sin(np.arange(800)) * 9000).astype("<i2").tobytes())
    return file.getvalue()
