"""Small videos and sounds, as the bytes that a client would send.

Videos are pans and zooms over the photographs, sounds are made from sines: both
are encoded here, the same each time, so nothing is downloaded or kept.
"""

import functools
import io
import tempfile
import wave
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import cv2
import numpy as np
from numpy.typing import NDArray

from tests.kit.media import Media
from tests.kit.photos import scaled_photo

SAMPLE_RATE = 16_000

Frame = NDArray[np.uint8]  # [height, width, 3] RGB
Samples = NDArray[np.float64]  # [num_samples], -1 to 1


class Video(Media):
    """An MP4 of at most 24 frames of 112×112 pixels."""

    modality: ClassVar[str] = "video"


class Sound(Media):
    """A WAV of at most two seconds: 16 kHz, mono, 16 bit."""

    modality: ClassVar[str] = "audio"


@functools.cache
def videos() -> dict[str, Video]:
    """Every video by name. They differ in size, frame rate and length."""
    found = [
        _video("coffee-pan.mp4", _pan("coffee.png", num_frames=16, width=112, height=112), fps=4),
        _video("rocket-zoom.mp4", _zoom("rocket.jpg", num_frames=24, width=112, height=84), fps=8),
    ]
    return {video.name: video for video in found}


def pan_at(fps: float) -> Video:
    """A pan over a photograph, with the same frames at every rate."""
    return _video(f"pan-{fps}.mp4", _pan("chelsea.png", num_frames=8, width=112, height=84), fps=fps)


@functools.cache
def sounds() -> dict[str, Sound]:
    """Every sound by name. They differ in length."""
    found = [_sound("chirp.wav", _chirp(seconds=1.0)), _sound("vowels.wav", _vowels(seconds=2.0))]
    return {sound.name: sound for sound in found}


def _pan(source: str, *, num_frames: int, width: int, height: int) -> list[Frame]:
    """A window that moves over the photograph from its left to its right."""
    picture = np.asarray(scaled_photo(source, 2 * width))
    lefts = np.linspace(0, picture.shape[1] - width, num_frames).astype(int)
    return [picture[:height, left : left + width] for left in lefts]


def _zoom(source: str, *, num_frames: int, width: int, height: int) -> list[Frame]:
    """A window that closes in on the photograph's middle, to a third of it."""
    picture = scaled_photo(source, 4 * width)
    frames = []
    for part in np.linspace(0.0, 1 / 3, num_frames):
        left, top = part * picture.width, part * picture.height
        box = (left, top, picture.width - left, picture.height - top)
        frames.append(np.asarray(picture.resize((width, height), box=box)))
    return frames


def _video(name: str, frames: list[Frame], fps: float) -> Video:
    height, width, _ = frames[0].shape
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
        for frame in frames:
            writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
        writer.release()
        return Video(name=name, mime="video/mp4", data=path.read_bytes())


def _chirp(seconds: float) -> Samples:
    """One tone that rises from 200 to 4,000 Hz."""
    return _sine(lambda part: 200 * 20**part, seconds)


def _vowels(seconds: float) -> Samples:
    """A falling voice of eight harmonics whose loudest one wanders, as in speech."""
    part = np.linspace(0, 1, int(seconds * SAMPLE_RATE))
    formant = 4.5 + 3.5 * np.sin(6 * np.pi * part)
    voice = [
        np.exp(-((number - formant) ** 2) / 4) * _sine(lambda part, n=number: n * (220 - 80 * part), seconds)
        for number in range(1, 9)
    ]
    return np.sum(voice, axis=0) / 4


def _sine(frequency_hz: Callable[[Samples], Samples], seconds: float) -> Samples:
    """A tone whose frequency is a function of the part of it that has passed, 0 to 1."""
    part = np.linspace(0, 1, int(seconds * SAMPLE_RATE))
    return np.sin(2 * np.pi * np.cumsum(frequency_hz(part)) / SAMPLE_RATE)


def _sound(name: str, samples: Samples) -> Sound:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((samples * 0.9 * 32767).astype("<i2").tobytes())
    return Sound(name=name, mime="audio/wav", data=buffer.getvalue())
