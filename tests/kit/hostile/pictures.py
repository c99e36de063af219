"""Odd pictures that are whole: every mode, format and size that a camera, an editor or a browser leaves."""

import functools
import io
import struct
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

from tests.kit.hostile.case import Case, accepted
from tests.kit.photos import scaled_photo

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""Left, top and the two steps of each pass of an interlaced PNG."""


@functools.cache
def photo(mode: str = "RGB", side: int = 90) -> Image.Image:
    """A photograph that is wider than high; where the mode has transparency, half of it is clear."""
    picture = scaled_photo("coffee.png", side)
    if mode in ("RGBA", "LA"):
        alpha = Image.linear_gradient("L").resize(picture.size)
        picture.putalpha(alpha)
    return picture.convert(mode)


def saved(picture: Image.Image, kind: str, **settings: Any) -> bytes:
    """The file that Pillow makes of a picture."""
    file = io.BytesIO()
    picture.save(file, kind, **settings)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A PNG's chunk with its checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int, height: int, depth: int, color: int, body: bytes, *, interlace: int = 0, before: bytes = b""
) -> bytes:
    """A PNG of any header; `before` are chunks in front of the pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    return PNG_MAGIC + chunk(b"IHDR", header) + before + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def with_chunk(file: bytes, extra: bytes) -> bytes:
    """The PNG with chunks put in after its header."""
    return file[:33] + extra + file[33:]


def with_segment(file: bytes, marker: int, data: bytes) -> bytes:
    """The JPEG with a segment put in at its start."""
    return file[:2] + struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data + file[2:]


def exif(orientation: int) -> bytes:
    """EXIF data that says how a camera was held: 1 to 8, or nonsense."""
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, orientation & 0xFFFF, 0)
    return b"Exif\0\0" + struct.pack(">2sHIH", b"MM", 42, 8, 1) + entry + struct.pack(">I", 0)


def icns(image: bytes) -> bytes:
    """An Apple icon that holds one picture and says that it has 32 pixels a side."""
    return b"icns" + struct.pack(">I4sI", len(image) + 16, b"icp5", len(image) + 8) + image


def _deep_png(channels: int, color: int) -> bytes:
    """16 bits a channel."""
    height, width = 30, 40
    ramp = np.arange(height * width * channels, dtype=">u2").reshape(height, -1) * 17
    return png(width, height, 16, color, b"".join(b"\0" + row.tobytes() for row in ramp))


def _interlaced_png() -> bytes:
    pixels = np.asarray(photo())
    lines: list[bytes] = []
    for left, top, step_x, step_y in _ADAM7:
        lines += [b"\0" + row.tobytes() for row in pixels[top::step_y, left::step_x]]
    return png(pixels.shape[1], pixels.shape[0], 8, 2, b"".join(lines), interlace=1)


def _frames(number: int = 3) -> list[Image.Image]:
    return [photo().rotate(90 * index) for index in range(number)]


def _animated(kind: str, **settings: Any) -> bytes:
    first, *others = _frames()
    return saved(first, kind, save_all=True, append_images=others, duration=100, **settings)


def _modes() -> Iterable[tuple[str, bytes]]:
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        yield f"png-{mode}", saved(photo("I").convert("I;16") if mode == "I;16" else photo(mode), "PNG")
    yield "png-P-clear", saved(photo("P"), "PNG", transparency=3)
    yield "png-P-alphas", saved(photo("P"), "PNG", transparency=bytes(range(256)))
    yield "png-L-clear", saved(photo("L"), "PNG", transparency=80)
    yield "png-RGB-clear", saved(photo(), "PNG", transparency=(90, 90, 90))
    yield "png-16-bit-RGB", _deep_png(3, 2)
    yield "png-16-bit-RGBA", _deep_png(4, 6)
    yield "png-16-bit-LA", _deep_png(2, 4)
    yield "png-interlaced", _interlaced_png()
    yield "png-four-colors", saved(photo().quantize(4), "PNG", bits=2)
    for mode in ("L", "CMYK"):
        yield f"jpeg-{mode}", saved(photo(mode), "JPEG")
    yield "jpeg-progressive", saved(photo(), "JPEG", progressive=True)
    yield "jpeg-444", saved(photo(), "JPEG", subsampling=0)
    yield "jpeg-quality-1", saved(photo(), "JPEG", quality=1)
    yield "jpeg-restarts", saved(photo(), "JPEG", restart_marker_blocks=2)


def _formats() -> Iterable[tuple[str, bytes]]:
    for kind in (
        "AVIF",
        "BMP",
        "DDS",
        "GIF",
        "ICNS",
        "ICO",
        "JPEG2000",
        "PCX",
        "PPM",
        "QOI",
        "SGI",
        "TGA",
        "TIFF",
        "WEBP",
    ):
        yield kind.lower(), saved(photo().resize((64, 64)) if kind == "ICO" else photo(), kind)
    for mode in ("1", "L", "P"):
        yield f"bmp-{mode}", saved(photo(mode), "BMP")
        yield f"tiff-{mode}", saved(photo(mode), "TIFF")
    for mode in ("1", "L"):
        yield f"ppm-{mode}", saved(photo(mode), "PPM")
    yield "ppm-plain", b"P3 2 2 255\n 255 0 0  0 255 0\n 0 0 255  9 9 9\n"
    yield "ppm-16-bit", b"P6 40 30 65535\n" + bytes(range(240)) * 30
    yield "pfm-float", b"Pf\n40 30\n-1.0\n" + np.linspace(0, 255, 1200, dtype="<f4").tobytes()
    yield "icns", icns(saved(photo().resize((32, 32)), "PNG"))
    yield "xbm", saved(photo("1"), "XBM")
    yield "ico-RGBA", saved(photo("RGBA").resize((48, 48)), "ICO", sizes=[(16, 16), (32, 32), (48, 48)])
    yield "bmp-RGBA", saved(photo("RGBA"), "BMP")
    yield "tga-RGBA", saved(photo("RGBA"), "TGA", compression="tga_rle")
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"):
        yield f"tiff-{compression}", saved(photo(), "TIFF", compression=compression)
    for mode in ("CMYK", "RGBA", "LAB", "YCbCr", "I", "F"):
        yield f"tiff-{mode}", saved(photo(mode), "TIFF")
    yield "tiff-16-bit", saved(photo("I").convert("I;16"), "TIFF")
    yield "tiff-frames", _animated("TIFF")
    yield "webp-lossless", saved(photo(), "WEBP", lossless=True)
    yield "webp-RGBA", saved(photo("RGBA"), "WEBP")
    yield "avif-RGBA", saved(photo("RGBA"), "AVIF")
    yield "jpeg2000-RGBA", saved(photo("RGBA"), "JPEG2000")
    yield "jpeg2000-codestream", saved(photo(), "JPEG2000", no_jp2=True)
    yield "gif-clear", saved(photo("P"), "GIF", transparency=3)
    yield "mpo-two-pictures", saved(photo(), "MPO", save_all=True, append_images=_frames()[1:])
    for kind in ("GIF", "WEBP", "PNG", "AVIF"):
        yield f"{kind.lower()}-animated", _animated(kind)
    yield "gif-animated-clear", _animated("GIF", disposal=2, transparency=0)


def _orientations() -> Iterable[tuple[str, bytes]]:
    for value in (*range(1, 9), 0, 9, 65535):
        yield f"jpeg-orientation-{value}", saved(photo(), "JPEG", exif=exif(value))
    yield "png-orientation-6", saved(photo(), "PNG", exif=exif(6))
    yield "webp-orientation-8", saved(photo(), "WEBP", exif=exif(8))
    yield "tiff-orientation-6", saved(photo(), "TIFF", tiffinfo={274: 6})
    yield "png-RGBA-orientation-3", saved(photo("RGBA"), "PNG", exif=exif(3))


def _sizes() -> Iterable[tuple[str, bytes]]:
    for width, height in (
        (1, 1),
        (2, 1),
        (1, 2),
        (3, 3),
        (1, 3),
        (3, 1),
        (4, 4),
        (27, 29),
        (28, 28),
        (199, 1),
        (1, 199),
        (2000, 11),
    ):
        yield f"png-{width}x{height}", saved(photo().resize((width, height)), "PNG")
    yield "jpeg-1x1", saved(photo().resize((1, 1)), "JPEG")
    yield "gif-1x1", saved(photo("P").resize((1, 1)), "GIF")
    yield "png-L-1x1", saved(photo("L").resize((1, 1)), "PNG")


def _decorated() -> Iterable[tuple[str, bytes]]:
    """Whole pictures with something broken or large beside them that no decoder needs."""
    jpeg, image = saved(photo(), "JPEG"), saved(photo(), "PNG")
    yield "jpeg-icc-broken", saved(photo(), "JPEG", icc_profile=b"no profile" * 9)
    yield "jpeg-icc-part-9-of-2", with_segment(jpeg, 0xE2, b"ICC_PROFILE\0\x09\x02" + bytes(64))
    yield "png-icc-broken", saved(photo(), "PNG", icc_profile=b"no profile" * 9)
    yield "png-icc-not-compressed", with_chunk(image, chunk(b"iCCP", b"name\0\0" + b"x" * 40))
    yield "webp-icc-broken", saved(photo(), "WEBP", icc_profile=b"no profile" * 9)
    yield "jpeg-exif-garbage", with_segment(jpeg, 0xE1, b"Exif\0\0" + bytes(range(256)))
    yield "jpeg-exif-loop", with_segment(jpeg, 0xE1, b"Exif\0\0" + struct.pack(">2sHIHI", b"MM", 42, 8, 0, 8))
    yield "jpeg-comments", with_segment(jpeg, 0xFE, b"x" * 60000)
    yield "png-texts", with_chunk(image, chunk(b"tEXt", b"Comment\0" + b"x" * 500) * 40)
    yield "png-text-900-KiB", with_chunk(image, chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(900 << 10))))
    yield "jpeg-trailing", jpeg + b"\xff\xd8\xff" + b"garbage" * 200
    yield "png-trailing", image + b"garbage" * 200
    yield "gif-trailing", saved(photo("P"), "GIF") + b"garbage" * 200
    yield "webp-trailing", saved(photo(), "WEBP") + b"garbage" * 200
    yield "jpeg-then-zip", jpeg + b"PK\x03\x04" + bytes(60)
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta tiff:Orientation='6'/>")
    yield "png-xmp-orientation", saved(photo(), "PNG", pnginfo=info)


def odd_pictures() -> Iterable[Case]:
    for part in (_modes, _formats, _orientations, _sizes, _decorated):
        yield from accepted("image", dict(part()))
