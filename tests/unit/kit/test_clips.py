"""The videos and sounds decode as they say, show and sound like something, and are the same each time."""

import hashlib
import io
import itertools
import subprocess
import sys
import wave

import cv2
import numpy as np
import pytest

from tests.kit.clips import SAMPLE_RATE, Sound, Video, sounds, videos

SHAPES = {  # frames, height, width and frames a second
    "coffee-pan.mp4": (16, 112, 112, 4),
    "rocket-zoom.mp4": (24, 84, 112, 8),
}


def digests() -> list[str]:
    return [hashlib.sha256(media.data).hexdigest() for media in [*videos().values(), *sounds().values()]]


@pytest.fixture(params=sorted(videos()))
def video(request: pytest.FixtureRequest) -> Video:
    return videos()[request.param]


@pytest.fixture(params=sorted(sounds()))
def sound(request: pytest.FixtureRequest) -> Sound:
    return sounds()[request.param]


def test_video_decodes_as_it_says(video: Video) -> None:
    capture = cv2.VideoCapture(io.BytesIO(video.data), cv2.CAP_FFMPEG, [])
    frames = []
    while (read := capture.read())[0]:
        frames.append(read[1])
    assert (*np.shape(frames)[:3], capture.get(cv2.CAP_PROP_FPS)) == SHAPES[video.name]
    assert min(cv2.absdiff(*pair).mean() for pair in itertools.pairwise(frames)) > 1
    assert min(frame.std() for frame in frames) > 10


def test_sound_decodes_as_it_says(sound: Sound) -> None:
    with wave.open(io.BytesIO(sound.data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, SAMPLE_RATE)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert SAMPLE_RATE <= len(samples) <= 2 * SAMPLE_RATE
    assert 0.5 < np.abs(samples).max() / 32767 < 1


def test_lengths_differ() -> None:
    assert len({len(sound.data) for sound in sounds().values()}) == len(sounds())


def test_data_urls_name_the_format() -> None:
    heads = {media.data_url.partition(",")[0] for media in [*videos().values(), *sounds().values()]}
    assert heads == {"data:video/mp4;base64", "data:audio/wav;base64"}


def test_another_process_makes_the_same_bytes() -> None:
    code = "from tests.unit.kit.test_clips import digests; print(*digests())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == digests()
