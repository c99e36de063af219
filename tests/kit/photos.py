"""Real photographs, small, as the bytes that a client would send.

They ship inside scikit-image's wheel (its `data` folder), so nothing is downloaded.
Sizes differ on purpose: each gives the encoder another grid, and some are scaled by
its processor while others fit as they are.
"""

import functools
import io
from importlib.resources import files
from typing import ClassVar

from PIL import Image

from tests.kit.media import Media

# source file → longest side in pixels
SOURCES = {
    "astronaut.png": 224,
    "chelsea.png": 256,
    "coffee.png": 252,
    "hubble_deep_field.jpg": 140,
    "motorcycle_left.png": 196,
    "retina.jpg": 112,
    "rocket.jpg": 256,
}
FORMATS = {"jpg": ("JPEG", "image/jpeg"), "png": ("PNG", "image/png")}


class Photo(Media):
    """At most 256 pixels on its longest side."""

    modality: ClassVar[str] = "image"


@functools.cache
def photos() -> dict[str, Photo]:
    """Every photograph, as JPEG and as PNG, by name."""
    found = (_encode(source, side, suffix) for source, side in SOURCES.items() for suffix in FORMATS)
    return {photo.name: photo for photo in found}


def half_clear(background: tuple[int, int, int] | None = None) -> Photo:
    """A photograph of which one half lets the background through, or has this one."""
    picture = scaled_photo("coffee.png", 196).convert("RGBA")
    picture.paste((0, 0, 0, 0), (0, 0, picture.width // 2, picture.height))
    if background is not None:
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (*background, 255)), picture).convert("RGB")
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return Photo(name="half-clear.png", mime="image/png", data=buffer.getvalue())


def _encode(source: str, longest_side: int, suffix: str) -> Photo:
    picture_format, mime = FORMATS[suffix]
    buffer = io.BytesIO()
    scaled_photo(source, longest_side).save(buffer, picture_format)
    return Photo(name=f"{source.split('.')[0]}.{suffix}", mime=mime, data=buffer.getvalue())


def scaled_photo(source: str, longest_side: int) -> Image.Image:
    """The photograph in a file of scikit-image's, no larger than asked."""
    with (files("skimage") / "data" / source).open("rb") as file:
        picture = Image.open(file).convert("RGB")
    picture.thumbnail((longest_side, longest_side))
    return picture
