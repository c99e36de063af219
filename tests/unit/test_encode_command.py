"""`ec-producer encode`: the modality that a file's name says. The calls are in the integration tests."""

import mimetypes
from pathlib import Path

import pytest

from producer.encode_command import _modality
from producer.wire.modality import modality_name

EVERYWHERE = {
    "a.png": "image",
    "a.jpg": "image",
    "A.JPEG": "image",
    "a.gif": "image",
    "a.webp": "image",
    "a": "image",
    "a.bin": "image",
    "a.txt": "image",
    ".mp4": "image",
    "a.mp4": "video",
    "A.MP4": "video",
    "a.b.mov": "video",
    "a.webm": "video",
    "a.avi": "video",
    "folder.mp4/a.png": "image",
    "a.wav": "audio",
    "a.mp3": "audio",
    "a.opus": "audio",
}
BY_MIME_TYPES = {"a.mkv": "video", "a.flac": "audio", "a.ogg": "audio", "a.m4a": "audio"}
"""Python's own table does not have them: /etc/mime.types does, where it is installed."""


@pytest.fixture
def bare_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without /etc/mime.types, such as python:3.11-slim."""
    types = mimetypes.MimeTypes()
    monkeypatch.setattr(mimetypes, "guess_type", types.guess_type)


@pytest.mark.parametrize(("name", "modality"), EVERYWHERE.items())
@pytest.mark.usefixtures("bare_host")
def test_the_name_says_what_a_file_is(name: str, modality: str) -> None:
    assert modality_name(_modality(Path(name))) == modality


@pytest.mark.parametrize(("name", "modality"), BY_MIME_TYPES.items())
@pytest.mark.usefixtures("bare_host")
def test_usual_files_are_known_on_a_bare_host_too(name: str, modality: str) -> None:
    assert modality_name(_modality(Path(name))) == modality
