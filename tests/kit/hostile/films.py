"""Odd and hostile videos. Each is a few frames of a photograph; what is wrong with it is put in by hand."""

import functools
import io
import struct
import tempfile
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.kit.clips import sounds
from tests.kit.hostile.case import TOO_LARGE, UNREADABLE, Case, accepted, refused
from tests.kit.hostile.pictures import photo, saved

MS = Fraction(1, 1000)


def film(
    kind: str = "mp4",
    codec: str = "mpeg4",
    *,
    num_frames: int = 8,
    size: tuple[int, int] = (112, 84),
    rate: int = 4,
    times: Sequence[int] = (),
    options: dict[str, str] | None = None,
    pixels: str = "yuv420p",
) -> bytes:
    """A video of `num_frames` frames; `times` are milliseconds at which they are shown, where they are not even."""
    picture = np.asarray(photo(side=180).resize((size[0] + num_frames, size[1])))
    with (
        tempfile.NamedTemporaryFile() as file,  # FFmpeg moves headers to the front of files only
        av.open(file.name, "w", format=kind, options=options or {}) as container,
    ):
        stream: Any = container.add_stream(codec, rate=rate, options={"threads": "1"})
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        if times:
            stream.codec_context.time_base = MS
        for index in range(num_frames):
            shown = np.ascontiguousarray(picture[:, index : index + size[0]])
            frame = av.VideoFrame.from_ndarray(shown, "rgb24")
            if times:
                frame.pts, frame.time_base = times[index], MS
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        container.close()
        return Path(file.name).read_bytes()


def talkie(*, video: bool = True, kind: str = "mp4", codec: str = "aac") -> bytes:
    """Two seconds with sound, and with pictures if asked."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        shown: Any = container.add_stream("mpeg4", rate=4) if video else None
        heard: Any = container.add_stream(codec, rate=48000)
        if shown:
            shown.width, shown.height, shown.pix_fmt = 112, 84, "yuv420p"
            picture = np.asarray(photo().resize((112, 84)))
            for _ in range(8):
                container.mux(shown.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
            container.mux(shown.encode())
        wave = np.sin(np.arange(96_000, dtype="<f4") / 20)[None]
        for start in range(0, 96_000, 960):
            block = av.AudioFrame.from_ndarray(np.ascontiguousarray(wave[:, start : start + 960]), "fltp", "mono")
            block.sample_rate, block.pts = 48000, start
            container.mux(heard.encode(block))
        container.mux(heard.encode())
    return file.getvalue()


@functools.cache
def _plain() -> bytes:
    return film()


def _patched(name: bytes, at: int, values: bytes, data: bytes | None = None) -> bytes:
    """The MP4 with bytes of the box `name` replaced, `at` counted from the box's name."""
    file = bytearray(_plain() if data is None else data)
    start = file.index(name) + at
    file[start : start + len(values)] = values
    return bytes(file)


def _u32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def _odd() -> Iterable[tuple[str, bytes]]:
    yield "mp4-mpeg4", _plain()
    yield "mp4-h264", film(codec="libx264")
    yield "mp4-header-first", film(options={"movflags": "+faststart"})
    yield "mp4-fragments", film(options={"movflags": "+frag_keyframe+empty_moov"})
    yield "webm-vp8", film("webm", "libvpx")
    yield "webm-vp9", film("webm", "libvpx-vp9")
    yield "mkv-h264", film("matroska", "libx264")
    yield "mov-mjpeg", film("mov", "mjpeg", pixels="yuvj420p")
    yield "avi-mpeg4", film("avi")
    yield "gif-as-video", film("gif", "gif", pixels="rgb8")
    yield "mp4-2-frames", film(num_frames=2)
    yield "mp4-3-frames", film(num_frames=3)
    yield "mp4-64x2", film(size=(64, 2))
    yield "mp4-2x64", film(size=(2, 64))
    yield "mp4-2x2", film(size=(2, 2))
    yield "mp4-odd-sides", film(codec="libx264", size=(57, 31), pixels="yuv444p")
    yield "mp4-uneven-times", film(times=(0, 10, 900, 910, 2000, 2010, 2020, 5000))
    yield "mp4-1-frame-an-hour", film(num_frames=3, times=(0, 3_600_000, 7_200_000))
    yield "mp4-240-Hz", film(rate=240, num_frames=24)
    yield "mp4-with-sound", talkie()
    yield "mp4-trailing", _plain() + b"garbage" * 300
    yield "mp4-turned", _turned()
    yield "mov-png-RGBA", film("mov", "png", pixels="rgba")
    yield "mp4-size-that-lies", _patched(b"tkhd", 80, _u32(4000 << 16, 3000 << 16))
    yield "mp4-duration-that-lies", _patched(b"mvhd", 20, _u32(0xFFFFFFFF))
    yield "mov-64x1", film("mov", "png", size=(64, 1), pixels="rgb24")
    yield "mov-1x1", film("mov", "png", size=(1, 1), pixels="rgb24")
    yield "mp4-0x0-in-its-header", _patched(b"mp4v", 28, bytes(4))
    yield "mp4-unknown-codec", _patched(b"mp4v", 0, b"zzzz")
    yield "mp4-chunks-past-the-end", _patched(b"stco", 8, _u32(0x7FFFFFFF))
    yield "mp4-box-of-4-GiB", _patched(b"moov", -4, _u32(0xFFFFFFFF))
    whole = film("mov", "mjpeg", pixels="yuvj420p", options={"movflags": "+faststart"})
    yield "mov-mjpeg-header-first-cut-at-60%", whole[: len(whole) * 6 // 10]
    yield from _lying()


def _turned() -> bytes:
    """The matrix of its track says: 90 degrees to the right."""
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 84 << 16, 0, 1 << 30)
    return _patched(b"tkhd", 44, matrix)


def _lying() -> Iterable[tuple[str, bytes]]:
    """Headers that say another number of frames, or rate, than there is; vLLM counts for itself."""
    yield "mp4-says-1000000-frames", _patched(b"stts", 12, _u32(1_000_000, 1))
    yield "mp4-says-4-of-8-frames", _patched(b"stsz", 12, _u32(4))
    yield "mp4-says-99-of-8-frames", _patched(b"stts", 12, _u32(99, 256))
    yield "mp4-2147483647-Hz", _patched(b"mdhd", 16, _u32(0x7FFFFFFF))
    yield "mp4-frames-of-no-time", _patched(b"stts", 16, _u32(0))
    avi = bytearray(film("avi"))
    struct.pack_into("<I", avi, avi.index(b"strh") + 8 + 32, 0x7FFFFFFF)
    yield "avi-says-2147483647-frames", bytes(avi)
    yield "mkv-says-1e12-ms", _timed_mkv(1e12)


def _timed_mkv(milliseconds: float) -> bytes:
    """It says that it is so long."""
    mkv = film("matroska", "libx264")
    at = mkv.index(b"\x44\x89\x88") + 3
    return mkv[:at] + struct.pack(">d", milliseconds) + mkv[at + 8 :]


def _bad() -> Iterable[tuple[str, bytes]]:
    for part in (1, 50, 90):
        yield f"mp4-cut-at-{part}%", _plain()[: len(_plain()) * part // 100]
    first = film(options={"movflags": "+faststart"})
    for part in (10, 60, 90):
        yield f"mp4-header-first-cut-at-{part}%", first[: len(first) * part // 100]
    for kind in ("matroska", "avi"):
        whole = film(kind, num_frames=24)
        yield f"{kind}-cut-at-60%", whole[: len(whole) * 6 // 10]
    yield "one-byte", b"\0"
    yield "text", b"this is not a video"
    yield "a-photograph", saved(photo(), "PNG")
    yield "a-sound", sounds()["chirp.wav"].data[:8000]
    yield "mp4-magic-alone", _plain()[:32]
    yield "mp4-magic-and-zeros", _plain()[:32] + bytes(3000)
    yield "mp4-no-pictures", talkie(video=False)
    yield "mp4-1-frame", film(num_frames=1)
    yield "mp4-no-samples", _patched(b"stsz", 8, _u32(0, 0))
    yield "mp4-body-of-zeros", _zero_body()
    yield "mp4-time-scale-0", _patched(b"mdhd", 16, _u32(0))
    yield "mp4-time-scale-1", _patched(b"mdhd", 16, _u32(1))
    yield "mkv-says-1e300-ms", _timed_mkv(1e300)
    yield "mkv-says-nan-ms", _timed_mkv(float("nan"))
    yield "ts-h264-of-8-frames", film("mpegts", "libx264")  # after vLLM's seek to its end nothing more is read
    yield "y4m-bomb", b"YUV4MPEG2 W60000 H60000 F4:1\nFRAME\n" + bytes(999)
    yield "avi-frames-of-60000x60000", _resized_avi(60_000)


def _lists() -> Iterable[tuple[str, bytes]]:
    """What has FFmpeg open other files or sockets."""
    entry = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n%b\n#EXT-X-ENDLIST\n"
    yield "playlist-of-a-file", entry % b"file:///etc/passwd"
    yield "playlist-of-a-url", entry % b"http://127.0.0.1:9/a.ts"
    yield "list-of-a-url", b"ffconcat version 1.0\nfile http://127.0.0.1:9/a.mp4\n"
    yield "list-of-a-file-behind-a-tag", b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + b"ffconcat version 1.0\nfile a.mp4\n"
    yield "sockets", b"v=0\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nm=video 9 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n"


def _zero_body() -> bytes:
    file = bytearray(_plain())
    start, size = file.index(b"mdat") + 4, struct.unpack_from(">I", file, file.index(b"mdat") - 4)[0] - 8
    file[start : start + size] = bytes(size)
    return bytes(file)


def _tables() -> Iterable[tuple[str, bytes]]:
    """What takes FFmpeg gigabytes to open."""
    yield "mp4-30000000-frames-of-a-byte", _tabled(30_000_000)
    yield "mp4-4294967295-frames-of-9-bytes", _tabled(0xFFFFFFFF, size=9)


def _large() -> Iterable[tuple[str, bytes]]:
    yield "avi-8-frames-of-9000x9000", _resized_avi(9000)
    yield "mp4-200000-frames-of-a-byte", _tabled(200_000) + bytes(200_000)


def _tabled(num_frames: int, *, size: int = 1) -> bytes:
    """Its tables say so consistently, in few bytes."""
    tables = (
        (b"stts", _u32(0, 1, num_frames, 4096)),
        (b"stsc", _u32(0, 1, 1, num_frames, 1)),
        (b"stsz", _u32(0, size, num_frames)),
        (b"stss", _u32(0, 1, 1)),
    )
    file = bytearray(_plain())
    for name, body in tables:
        at = file.index(name)
        length = struct.unpack_from(">I", file, at - 4)[0]
        file[at - 4 : at - 4 + length] = _u32(len(body) + 8) + name + body
        for parent in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
            start = file.index(parent) - 4
            struct.pack_into(">I", file, start, struct.unpack_from(">I", file, start)[0] + len(body) + 8 - length)
    return bytes(file)


def _resized_avi(side: int) -> bytes:
    """Header and JPEGs say that a frame has so many pixels a side."""
    avi = bytearray(film("avi", "mjpeg", pixels="yuvj420p"))
    struct.pack_into("<II", avi, avi.index(b"avih") + 8 + 32, side, side)
    struct.pack_into("<ii", avi, avi.index(b"strf") + 8 + 4, side, side)
    at = -1
    while (at := avi.find(b"\xff\xc0\0\x11", at + 1)) > 0:
        struct.pack_into(">HH", avi, at + 5, side, side)
    return bytes(avi)


def films() -> Iterable[Case]:
    """Every video of the table."""
    yield from accepted("video", dict(_odd()))
    yield Case(modality="video", name="empty", data=b"", outcome="MEDIA_EMPTY")
    yield from refused("video", UNREADABLE, dict(_bad()))
    yield from refused("video", UNREADABLE, dict(_lists()), stricter="FFmpeg opens what it names")
    yield from refused("video", UNREADABLE, dict(_tables()), stricter="FFmpeg takes gigabytes for it")
    yield from refused("video", TOO_LARGE, dict(_large()), stricter="our bound")
