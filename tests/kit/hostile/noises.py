"""Odd and hostile sounds: every width, rate and container, and headers that lie."""

import functools
import io
import struct
from collections.abc import Iterable

import numpy as np
import soundfile
from numpy.typing import NDArray

from tests.kit.hostile.case import TOO_LARGE, UNREADABLE, Case, accepted, refused
from tests.kit.hostile.films import film, talkie
from tests.kit.hostile.pictures import photo, saved

Samples = NDArray[np.float64]
PCM, FLOAT = 1, 3


@functools.cache
def _hum(seconds: float = 1.0, rate: int = 16_000) -> Samples:
    """A tone that grows louder."""
    times = np.arange(int(seconds * rate)) / rate
    return np.sin(times * 2200) * np.minimum(times + 0.1, 0.9)


def wav(
    samples: bytes, *, rate: int = 16_000, channels: int = 1, bits: int = 16, kind: int = PCM, says: int | None = None
) -> bytes:
    """A WAV of any header; `says` is the size of the samples that it claims."""
    block = max(1, channels * bits // 8)
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * block & 0xFFFFFFFF, block & 0xFFFF, bits)
    size = len(samples) if says is None else says
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", size) + samples
    return b"RIFF" + struct.pack("<I", len(body) & 0xFFFFFFFF) + body


def sound(kind: str, subtype: str | None = None, *, seconds: float = 1.0, rate: int = 16_000) -> bytes:
    """What libsndfile makes of the hum."""
    file = io.BytesIO()
    soundfile.write(file, _hum(seconds, rate), rate, format=kind, subtype=subtype)
    return file.getvalue()


def _floats(values: Samples) -> bytes:
    return values.astype("<f4").tobytes()


def _shorts(values: Samples) -> bytes:
    return (values * 32767).astype("<i2").tobytes()


def _with(value: float) -> bytes:
    """A second of 32-bit floats of which one is `value`."""
    values = _hum().copy()
    values[8000] = value
    return wav(_floats(values), bits=32, kind=FLOAT)


def _odd() -> Iterable[tuple[str, bytes]]:
    for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM"):
        yield f"wav-{subtype.lower()}", sound("WAV", subtype)
    for kind in (
        "AIFF",
        "AU",
        "CAF",
        "FLAC",
        "MP3",
        "OGG",
        "RF64",
        "W64",
        "WAVEX",
        "SVX",
        "NIST",
        "VOC",
        "IRCAM",
        "PAF",
    ):
        yield kind.lower(), sound(kind)
    yield "flac-24-bit", sound("FLAC", "PCM_24")
    yield "ogg-opus", sound("OGG", "OPUS")
    yield "m4a-aac", talkie(video=False)
    yield "mp4-with-pictures", talkie()
    yield "webm-opus", talkie(video=False, kind="webm", codec="libopus")
    for rate in (100, 8000, 11_025, 22_050, 44_100, 48_000, 96_000, 384_000):
        yield f"wav-{rate}-Hz", wav(_shorts(_hum(rate=rate)), rate=rate)
    yield "wav-1-Hz", wav(_shorts(np.linspace(-0.5, 0.5, 20)), rate=1)
    yield "wav-2-channels", wav(_shorts(np.repeat(_hum(), 2)), channels=2)
    yield "wav-64-channels", wav(_shorts(np.repeat(_hum(0.2), 64)), channels=64)
    yield "wav-40-ms", wav(_shorts(_hum(0.04)))
    yield "wav-45-seconds", wav(_shorts(_hum(45, 2000)), rate=2000)
    yield "wav-silence", wav(bytes(32_000))
    yield "wav-too-loud", wav(_floats(_hum() * 1e6), bits=32, kind=FLOAT)
    yield "wav-tiny-floats", wav(_floats(_hum() * 1e-42), bits=32, kind=FLOAT)
    yield "wav-says-4-GiB", wav(_shorts(_hum()), says=0xFFFFFFFF)
    yield "wav-says-2-GiB", wav(_shorts(_hum()), says=0x7FFFFFFF)
    yield "wav-says-half", wav(_shorts(_hum()), says=16_000)
    yield "wav-cut-in-a-sample", wav(_shorts(_hum()))[:-1]
    yield "wav-cut-at-50%", wav(_shorts(_hum()))[:16_000]
    yield "wav-trailing", wav(_shorts(_hum())) + b"LIST\xff\xff\xff\x7fgarbage"
    yield "mp3-cut-at-50%", _cut(sound("MP3"), 50)
    yield "mp3-big-tag", b"ID3\x04\0\0\0\x03\x7f\x7f" + bytes(65_535) + sound("MP3")


def _cut(data: bytes, part: int) -> bytes:
    return data[: len(data) * part // 100]


def _flac(num_samples: int) -> bytes:
    """Its header says that it has so many."""
    data = bytearray(sound("FLAC"))
    (packed,) = struct.unpack_from(">Q", data, 18)
    struct.pack_into(">Q", data, 18, packed >> 36 << 36 | num_samples)
    return bytes(data)


def _bad() -> Iterable[tuple[str, bytes]]:
    yield "one-byte", b"\0"
    yield "zeros", bytes(4000)
    yield "text", b"this is not a sound"
    yield "a-photograph", saved(photo(), "PNG")
    yield "a-jpeg", saved(photo(), "JPEG")
    yield "a-video-without-sound", film()
    for kind in ("WAV", "FLAC", "OGG", "MP3", "AIFF", "CAF"):
        yield f"{kind.lower()}-cut-at-its-header", sound(kind)[:20]
    yield "m4a-cut-at-50%", _cut(talkie(video=False), 50)
    yield "flac-cut-at-50%", _cut(sound("FLAC"), 50)
    yield "ogg-cut-at-50%", _cut(sound("OGG"), 50)
    yield "wav-gsm610", sound("WAV", "GSM610")
    yield "wav-1-sample", wav(b"\x11\x11")
    yield "wav-no-samples", wav(b"")
    yield "wav-0-channels", wav(bytes(320), channels=0)
    yield "wav-0-bits", wav(bytes(320), bits=0)
    yield "wav-0-Hz", wav(bytes(320), rate=0)
    yield "wav-4294967295-Hz", wav(bytes(3200), rate=0xFFFFFFFF)
    yield "wav-65535-channels", wav(bytes(65535 * 4), channels=65535)
    yield "wav-kind-9999", wav(bytes(3200), kind=9999)
    yield "wav-no-format", b"RIFF\x24\0\0\0WAVEdata\x10\0\0\0" + bytes(16)


def _senseless() -> Iterable[tuple[str, bytes]]:
    """vLLM takes them, and makes embeddings that are no numbers, or resamples for minutes."""
    yield "wav-one-not-a-number", _with(float("nan"))
    yield "wav-one-infinite", _with(float("inf"))
    yield "wav-all-not-a-number", wav(_floats(np.full(16_000, np.nan)), bits=32, kind=FLOAT)
    yield "wav-one-of-1e38", _with(1e38)
    yield "wav-2147483647-Hz", wav(bytes(3200), rate=0x7FFFFFFF)
    yield "wav-400000-Hz", wav(bytes(80_000), rate=400_000)


def _lists() -> Iterable[tuple[str, bytes]]:
    """What has FFmpeg open other files or sockets."""
    yield "playlist-of-a-file", b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    yield "list-of-files", b"ffconcat version 1.0\nfile pyproject.toml\n"
    yield "sockets", b"v=0\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nm=audio 9 RTP/AVP 0\r\n"


def _large() -> Iterable[tuple[str, bytes]]:
    """Few bytes that become, or say that they are, more than ten minutes."""
    yield "flac-11-minutes-of-silence", _silence("FLAC", "PCM_16", 660)
    yield "ogg-11-minutes-of-silence", _silence("OGG", "OPUS", 660)
    yield "flac-says-2-to-the-36-samples", _flac(2**36 - 1)
    yield "wav-601-seconds-at-1-Hz", wav(bytes(1202), rate=1)
    yield "mp3-11-minutes-of-silence", _silence("MP3", None, 660)


def _silence(kind: str, subtype: str | None, seconds: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(seconds * 8000), 8000, format=kind, subtype=subtype)
    return file.getvalue()


def noises() -> Iterable[Case]:
    """Every sound of the table."""
    yield from accepted("audio", dict(_odd()))
    yield Case(modality="audio", name="empty", data=b"", outcome="MEDIA_EMPTY")
    yield from refused("audio", UNREADABLE, dict(_bad()))
    yield from refused("audio", UNREADABLE, dict(_senseless()), stricter="its embedding is no number, or takes minutes")
    yield from refused("audio", UNREADABLE, dict(_lists()), stricter="FFmpeg opens what it names")
    yield from refused("audio", TOO_LARGE, dict(_large()))
