"""Hostile pictures: cut, mislabelled, lying and exploding ones. None is larger than 200 KB."""

import functools
import struct
import zlib
from collections.abc import Iterable

from PIL import Image

from tests.kit.clips import sounds, videos
from tests.kit.hostile.case import TOO_LARGE, UNREADABLE, Case, accepted, refused
from tests.kit.hostile.pictures import (
    PNG_MAGIC,
    chunk,
    exif,
    icns,
    photo,
    png,
    saved,
    with_chunk,
    with_segment,
)

HUGE = 60_000
"""Pixels of a side: 3.6 thousand million in all, no matter the format."""


@functools.cache
def _whole() -> dict[str, bytes]:
    kinds = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "AVIF", "JPEG2000", "PPM")
    files = {kind.lower(): saved(photo(), kind) for kind in kinds}
    files["tiff-lzw"] = saved(photo(), "TIFF", compression="tiff_lzw")
    files["jpeg-progressive"] = saved(photo(), "JPEG", progressive=True)
    return files


def _cut() -> dict[str, bytes]:
    """Each format, cut near its start, in its middle and near its end."""
    return {
        f"{kind}-cut-at-{part}%": data[: max(12, len(data) * part // 100)]
        for kind, data in _whole().items()
        for part in (1, 50, 90)
        if kind != "jpeg2000" or part == 1
    }


def _no_pictures() -> Iterable[tuple[str, bytes]]:
    yield "one-byte", b"\0"
    yield "zeros", bytes(5000)
    yield "text", b"this is not a picture"
    yield "html", b"<!DOCTYPE html><html><body>404</body></html>"
    yield (
        "svg",
        b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>',
    )
    yield "pdf", b"%PDF-1.7\n1 0 obj<<>>endobj\ntrailer<<>>\n%%EOF"
    yield "eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 50 50\n%%EndComments\n(/etc/passwd) run\n%%EOF\n"
    yield "wmf", struct.pack("<IHhhhhHIH", 0x9AC6CDD7, 0, 0, 0, 50, 50, 72, 0, 0) + bytes(50)
    yield "hdf5", b"\x89HDF\r\n\x1a\n" + bytes(100)
    yield "grib", b"GRIB\0\0\0\x01" + bytes(100)
    yield "mpeg", b"\0\0\x01\xb3\x05\x00\x50" + bytes(50)
    yield "zip", b"PK\x03\x04" + bytes(60)
    yield "base64-of-a-jpeg", b"/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0a"
    yield "a-sound", sounds()["chirp.wav"].data[:4000]
    yield "a-video", videos()["coffee-pan.mp4"].data
    for kind, magic in (
        ("jpeg", b"\xff\xd8\xff\xe0"),
        ("png", PNG_MAGIC),
        ("gif", b"GIF89a"),
        ("webp", b"RIFF\x20\0\0\0WEBP"),
    ):
        yield f"{kind}-magic-alone", magic
        yield f"{kind}-magic-and-zeros", magic + bytes(500)
    yield "png-magic-before-a-jpeg", PNG_MAGIC + _whole()["jpeg"]
    yield "jpeg-magic-before-a-png", b"\xff\xd8\xff" + _whole()["png"]


def _lies() -> Iterable[tuple[str, bytes]]:
    """Headers that say what the file does not hold."""
    lines = bytes(91 * 3 * 60)
    yield "png-0x0", png(0, 0, 8, 2, b"")
    yield "png-width-0", png(0, 60, 8, 2, lines)
    yield "png-no-pixels", png(90, 60, 8, 2, b"")
    yield "png-depth-3", png(90, 60, 3, 0, lines)
    yield "png-color-7", png(90, 60, 8, 7, lines)
    yield "png-wrong-checksum", _whole()["png"][:40] + b"\xff" + _whole()["png"][41:]
    yield "png-chunk-of-2-GiB", with_chunk(_whole()["png"], struct.pack(">I", 0x7FFFFFFF) + b"tEXt")
    yield "jpeg-0-lines", _resized_jpeg(90, 0)
    yield "jpeg-segment-too-long", b"\xff\xd8\xff\xe1\xff\xff" + b"Exif"
    yield "gif-0x0", b"GIF89a" + bytes(4) + b"\0\0\0\x3b"
    yield "gif-no-frame", b"GIF89a\x09\0\x09\0\0\0\0\x3b"
    yield "bmp-offset-past-the-end", _whole()["bmp"][:10] + b"\xff\xff\xff\x7f" + _whole()["bmp"][14:]
    yield "bmp-depth-7", _whole()["bmp"][:28] + b"\x07\0" + _whole()["bmp"][30:]
    yield "tiff-strip-past-the-end", _tiff(90, 60, offset=1 << 30)
    yield "tiff-no-directory", b"II*\0\0\0\0\0"
    yield "tiff-directory-past-the-end", b"II*\0\xff\xff\xff\x7f"
    yield "tiff-65535-tags", b"II*\0\x08\0\0\0\xff\xff" + struct.pack("<HHII", 256, 3, 1, 9) * 3000
    yield "ppm-no-size", b"P6\n"
    yield "ppm-text-for-size", b"P6 ten ten 255\n" + bytes(300)
    yield "ppm-size-of-99-digits", b"P6 " + b"9" * 99 + b" 1 255\n"
    yield "ppm-16-bit-cut", b"P6 40 30 65535\n" + bytes(240)
    yield "ico-nothing-inside", struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 9, 9, 0, 0, 1, 32, 99, 22)
    yield "webp-chunk-of-4-GiB", b"RIFF\xff\xff\xff\xffWEBPVP8X\xff\xff\xff\xff" + bytes(40)


def _bombs() -> Iterable[tuple[str, bytes]]:
    """Few bytes that say they are, or become, thousands of millions of pixels."""
    yield "png-bomb", png(HUGE, HUGE, 8, 6, bytes(1000))
    yield "png-bomb-2147483647", png(0x7FFFFFFF, 0x7FFFFFFF, 8, 2, b"")
    yield "png-bomb-2147483647x1", png(0x7FFFFFFF, 1, 1, 0, b"")
    yield "jpeg-bomb", _resized_jpeg(HUGE, HUGE)
    yield "jpeg-bomb-progressive", _resized_jpeg(HUGE, HUGE, kind="jpeg-progressive")
    yield "gif-bomb", b"GIF89a" + struct.pack("<HH", HUGE, HUGE) + _whole()["gif"][10:]
    yield "gif-bomb-in-its-frame", _gif_frame(HUGE, HUGE)
    yield "bmp-bomb", _whole()["bmp"][:18] + struct.pack("<ii", HUGE, HUGE) + _whole()["bmp"][26:]
    yield "bmp-bomb-upside-down", _whole()["bmp"][:18] + struct.pack("<ii", HUGE, -HUGE) + _whole()["bmp"][26:]
    yield "tiff-bomb", _tiff(HUGE, HUGE)
    yield "ppm-bomb", b"P6 %d %d 255\n" % (HUGE, HUGE)
    yield "ppm-bomb-1-bit", b"P4 %d %d\n" % (HUGE, HUGE)
    yield "tga-bomb", struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, HUGE, HUGE, 24, 0) + bytes(99)
    yield "qoi-bomb", b"qoif" + struct.pack(">IIBB", HUGE, HUGE, 3, 0) + bytes(99)
    yield "psd-bomb", b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 29_000, 29_000, 8, 3) + bytes(99)
    yield "pcx-bomb", _pcx(HUGE, HUGE)
    yield "sgi-bomb", struct.pack(">HBBHHHH", 474, 0, 1, 3, HUGE, HUGE, 3) + bytes(600)
    yield "dds-bomb", _whole_dds(HUGE, HUGE)
    yield "jpeg2000-bomb", _jpeg2000_bomb()
    yield "webp-bomb", b"RIFF\x22\0\0\0WEBPVP8L\x16\0\0\0\x2f" + struct.pack("<I", 16382 | 16382 << 14) + bytes(30)
    yield "webp-bomb-animated", _webp_animation(16_384, 16_384)
    yield "ico-bomb", _ico(png(HUGE, HUGE, 8, 6, bytes(1000)))
    yield "xbm-bomb", b"#define a_width %d\n#define a_height %d\nstatic char a_bits[] = {\n" % (HUGE, HUGE)


def _text_bombs() -> Iterable[tuple[str, bytes]]:
    """Compressed texts and profiles in a PNG that become gigabytes, or are many."""
    image, million = _whole()["png"], bytes(1 << 20)
    bomb = zlib.compress(bytes(64 << 20), 9)
    yield "png-text-bomb", with_chunk(image, chunk(b"zTXt", b"Comment\0\0" + bomb))
    yield "png-itxt-bomb", with_chunk(image, chunk(b"iTXt", b"Comment\0\x01\0\0\0" + bomb))
    yield "png-profile-bomb", with_chunk(image, chunk(b"iCCP", b"name\0\0" + bomb))
    yield "png-100-texts-of-1-MiB", with_chunk(image, chunk(b"zTXt", b"Comment\0\0" + zlib.compress(million, 9)) * 100)


def _thin() -> Iterable[tuple[str, bytes]]:
    """Whole pictures of a shape that the model's processor does not take."""
    for width, height in ((1000, 1), (1, 1000), (60_000, 1)):
        yield f"png-{width}x{height}", saved(Image.new("L", (width, height)), "PNG")


def _resized_jpeg(width: int, height: int, kind: str = "jpeg") -> bytes:
    data = bytearray(_whole()[kind])
    at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    struct.pack_into(">HH", data, at + 5, height, width)
    return bytes(data)


def _gif_frame(width: int, height: int) -> bytes:
    data = bytearray(_whole()["gif"])
    struct.pack_into("<HH", data, data.index(b",\0\0\0\0") + 5, width, height)
    return bytes(data)


def _tiff(width: int, height: int, offset: int = 8) -> bytes:
    """A grey TIFF of one strip whose bytes are said to be at `offset`."""
    tags = (
        (256, width),
        (257, height),
        (258, 8),
        (259, 1),
        (262, 1),
        (273, offset),
        (277, 1),
        (278, height),
        (279, 99),
    )
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + directory + bytes(4)


def _pcx(width: int, height: int) -> bytes:
    head = struct.pack("<BBBBHHHHHH", 10, 5, 1, 8, 0, 0, width - 1, height - 1, 72, 72)
    return (head + bytes(49) + struct.pack("<BH", 3, width)).ljust(128, b"\0") + bytes(99)


def _whole_dds(width: int, height: int) -> bytes:
    data = bytearray(saved(photo(), "DDS"))
    struct.pack_into("<II", data, 12, height, width)
    return bytes(data)


def _jpeg2000_bomb() -> bytes:
    data = bytearray(saved(photo(), "JPEG2000", no_jp2=True))
    struct.pack_into(">II", data, 8, HUGE, HUGE)
    return bytes(data)


def _webp_animation(width: int, height: int) -> bytes:
    """An animation whose canvas is as large as the format allows, and whose one frame is small."""
    frame = saved(photo(), "WEBP")[12:]
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    size = (photo().width - 1).to_bytes(3, "little") + (photo().height - 1).to_bytes(3, "little")
    body = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + canvas + b"ANIM" + struct.pack("<I", 6) + bytes(6)
    body += b"ANMF" + struct.pack("<I", 16 + len(frame)) + bytes(6) + size + bytes(4) + frame
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def _ico(image: bytes) -> bytes:
    """An icon that holds one picture and says that it has 16 pixels a side."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(image), 22) + image


def _stricter_bombs() -> Iterable[tuple[str, bytes]]:
    """What vLLM takes: up to 178956970 pixels, and any number of scans."""
    large = png(10_001, 10_000, 1, 0, bytes(1252 * 10_000))
    yield "png-100010000-pixels", large
    yield "ico-with-100010000-pixels", _ico(large)
    yield "jpeg-2000-scans", _scanned_jpeg(2000)


def _scanned_jpeg(number: int) -> bytes:
    """Progressive; its last scan, of a hundred bytes for four million pixels, comes again and again."""
    data = saved(Image.new("L", (2000, 2000), 128), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xc4") : -2]
    return data[:-2] + scan * number + data[-2:]


def _half_read() -> Iterable[tuple[str, bytes]]:
    """What is broken, and yet read in part: the rest is black, or white, as vLLM has it."""
    whole = _whole()
    lines = bytes(91 * 3 * 60)
    yield "png-no-palette", png(90, 60, 8, 3, lines)
    yield "png-half-the-pixels", png(90, 60, 8, 2, (b"\0" + b"\x99" * 270) * 30)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 2, 0, 0, 0))
    yield "png-not-deflate", PNG_MAGIC + header + chunk(b"IDAT", b"x" * 99)
    yield "jpeg-no-tables", b"\xff\xd8" + whole["jpeg"][whole["jpeg"].index(b"\xff\xc0") :]
    for part in (50, 90):
        yield f"jpeg2000-cut-at-{part}%", whole["jpeg2000"][: len(whole["jpeg2000"]) * part // 100]
    yield "icns-bomb", icns(png(HUGE, HUGE, 8, 6, bytes(1000)))


def _many() -> Iterable[tuple[str, bytes]]:
    """Much of what there should be little of, up to the limit; the picture itself is whole."""
    yield "png-100000000-pixels", png(10_000, 10_000, 1, 0, (b"\0" + bytes(range(250)) * 5) * 10_000)
    yield "png-9000-chunks", with_chunk(_whole()["png"], chunk(b"abCd", b"") * 9000)
    yield "gif-1000-frames", _long_gif()
    yield "tiff-directory-after-itself", _looped_tiff()
    yield (
        "jpeg-60-exifs",
        functools.reduce(lambda file, _: with_segment(file, 0xE1, exif(6)), range(60), _whole()["jpeg"]),
    )


def _long_gif() -> bytes:
    colors = [Image.new("P", (8, 8), index % 2 * 9) for index in range(1000)]
    return saved(colors[0], "GIF", save_all=True, append_images=colors[1:])


def _looped_tiff() -> bytes:
    data = bytearray(_tiff(4, 4, offset=0))
    data[-4:] = struct.pack("<I", 8)
    return bytes(data)


def bad_pictures() -> Iterable[Case]:
    """Every hostile picture of the table."""
    yield Case(modality="image", name="empty", data=b"", outcome="MEDIA_EMPTY")
    for part in (_cut(), dict(_no_pictures()), dict(_lies()), dict(_thin()), dict(_text_bombs())):
        yield from refused("image", UNREADABLE, part)
    yield from refused("image", TOO_LARGE, dict(_bombs()))
    yield from refused("image", TOO_LARGE, dict(_stricter_bombs()), stricter="our bound")
    yield from accepted("image", dict(_many()) | dict(_half_read()))
