"""What one media file may take, and what is never decoded. Checked on headers, before pixels or samples are made of it.

vLLM's own limits (`VLLM_MAX_IMAGE_PIXELS`, `VLLM_MAX_AUDIO_DECODE_DURATION_S`, …) hold beside these.
"""

import contextlib
import io
import os
import re
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

MAX_RATE_HZ = 384_000
"""Of a sound. Resampling takes memory and time with the rate, however short the sound is."""
_LOUDEST = 1e9
"""Of a sample, whose full scale is 1. The power of what is louder overflows float32, so that its features are none."""
_SCAN_WORK = 32
"""How often a JPEG may go over as many pixels as an image may have. A scan of few bytes goes over all of them."""
_OPENCV_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
_LISTS = (b"ffconcat version 1.0", b"#EXTM3U", b"\nc=IN IP", b"\rc=IN IP", b"urn:mpeg:dash:schema:mpd")
"""What FFmpeg takes for lists of other files, of addresses to fetch, or of sockets to open; anywhere, since tags may
come first."""
_EVEN_SAMPLES = re.compile(rb"\0\0\0[\x14-\x40]stsz.{4}(.{8})", re.DOTALL)
"""The table in an MP4 for samples of one size, and that size and their number. It is 0 where sizes differ."""


class MediaTooLargeError(ValueError):
    """The file is, or becomes, more than is allowed. The message is for its sender; it names both numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """Limits of one file, by default what fits into 4 GiB beside the libraries."""

    max_pixels: int = 100_000_000
    """Of an image. The hungriest decoder, of JPEG 2000 with transparency, takes 25 bytes a pixel."""
    max_video_pixels: int = 300_000_000
    """Of all frames together that are taken of a video. Decoded and scaled they take 9 bytes a pixel."""
    max_video_frames: int = 100_000
    """Of a video's file, an hour at 27 a second. Those before the last one that is taken are decoded, too."""
    max_audio_s: float = 600.0
    """Seconds of a sound, as vLLM has it."""

    def check_frames(self, num_frames: int) -> None:
        """Raises MediaTooLargeError for a video of too many frames."""
        if num_frames > self.max_video_frames:
            raise MediaTooLargeError(f"it has {num_frames} frames; at most {self.max_video_frames} are allowed")

    def check_video_pixels(self, num_frames: int, width: int, height: int) -> None:
        """Raises MediaTooLargeError for so many frames that are to be taken of a video."""
        if num_frames * width * height > self.max_video_pixels:
            raise MediaTooLargeError(
                f"{num_frames} frames of {width} by {height} pixels are taken of it;"
                f" at most {self.max_video_pixels} pixels are allowed"
            )

    def check_samples(self, samples: NDArray[np.float32], rate_hz: float) -> None:
        """Raises MediaTooLargeError for a sound that is too long, ValueError for one that no device records."""
        if not 1 <= rate_hz <= MAX_RATE_HZ:
            raise ValueError(f"its rate is {rate_hz:g} Hz; allowed are 1 to {MAX_RATE_HZ}")
        if len(samples) > self.max_audio_s * rate_hz:
            seconds = len(samples) / rate_hz
            raise MediaTooLargeError(f"it lasts {seconds:.1f} s; at most {self.max_audio_s:g} are allowed")
        if not (np.abs(samples) <= _LOUDEST).all():  # so for NaN, too
            raise ValueError("some of its samples are not finite, or beyond all loudness")

    @contextlib.contextmanager
    def pillow(self) -> Iterator[None]:
        """Has Pillow refuse larger images, also those inside of others, in the body. For a process of one decoder."""
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, self.max_pixels
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                yield
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            found = re.search(r"\((\d+) pixels\)", str(error))
            num_pixels = found[1] if found else "more"
            raise MediaTooLargeError(f"it has {num_pixels} pixels; at most {self.max_pixels} are allowed") from None
        finally:
            Image.MAX_IMAGE_PIXELS = before

    def check_image(self, data: bytes) -> None:
        """Raises MediaTooLargeError for a JPEG that is decoded over and over."""
        num_scans = data.count(b"\xff\xda") if data.startswith(b"\xff\xd8") else 0
        if num_scans <= _SCAN_WORK:
            return
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as picture:
            num_pixels = picture.width * picture.height
        if num_scans * num_pixels > _SCAN_WORK * self.max_pixels:
            raise MediaTooLargeError(f"its {num_pixels} pixels are coded in {num_scans} scans")

    def check_video(self, data: bytes) -> None:
        """Raises MediaTooLargeError for a file that says it has too many frames. What cannot be read passes.

        So does a number that is a lie, of more frames than bytes: vLLM counts for itself then.
        """
        source: Any = io.BytesIO(data)
        capture = cv2.VideoCapture(source, cv2.CAP_FFMPEG, [])
        try:
            num_frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) if capture.isOpened() else 0
        finally:
            capture.release()
        if num_frames <= len(data):
            self.check_frames(num_frames)


def refuse_traps(data: bytes) -> None:
    """Raises ValueError for a video or sound over which FFmpeg does what it must not.

    It reads other files and uses the network for lists of them, and takes 70 bytes for each sample in an MP4's table,
    be there any or not.
    """
    if data.startswith(b"c=IN IP") or any(mark in data for mark in _LISTS):
        raise ValueError("it is a list of other files or addresses, of which nothing is fetched")
    for table in _EVEN_SAMPLES.finditer(data):
        size, number = struct.unpack(">II", table[1])
        if size * number > len(data):
            raise ValueError(f"it says that it holds {number} samples of {size} bytes, more than it has")


@contextlib.contextmanager
def no_protocols() -> Iterator[None]:
    """In the body, OpenCV opens nothing but what it is handed: the second line behind `refuse_traps`."""
    before = os.environ.get(_OPENCV_OPTIONS)
    os.environ[_OPENCV_OPTIONS] = "|".join(filter(None, (before, "protocol_whitelist;none")))
    try:
        yield
    finally:
        os.environ.pop(_OPENCV_OPTIONS)
        if before is not None:
            os.environ[_OPENCV_OPTIONS] = before
