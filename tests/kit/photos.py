"""Real photographs, small, as the bytes that a client would send.

They ship inside scikit-image's wheel (its `data` folder), so nothing is downloaded.
Sizes differ on purpose: each gives the encoder another grid, and some are scaled by
its processor while others fit as they are.
"""

import base64
import functools
import io
from dataclasses import dataclass
from importlib.resources import files

from PIL import Image

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Photo:
    name: str
    """Subject and format, such as `coffee.jpg`."""
    mime: str
    data: bytes
    """The encoded file, at most 256 pixels on its longest side."""

    @property
    def data_url(self) -> str:
        """The form in which an OpenAI chat request carries an image's bytes."""
        return f"data:{self.mime};base64,{base64.b64encode(self.data).decode()}"


@functools.cache
def photos() -> dict[str, Photo]:
    """Every photograph, as JPEG and as PNG, by name."""
    found = (_encode(source, side, suffix) for source, side in SOURCES.items() for suffix in FORMATS)
    return {photo.name: photo for photo in found}


def _encode(source: str, longest_side: int, suffix: str) -> Photo:
    picture_format, mime = FORMATS[suffix]
    buffer = io.BytesIO()
    _scaled(source, longest_side).save(buffer, picture_format)
    return Photo(name=f"{source.split('.')[0]}.{suffix}", mime=mime, data=buffer.getvalue())


def _scaled(source: str, longest_side: int) -> Image.Image:
    with (files("skimage") / "data" / source).open("rb") as file:
        picture = Image.open(file).convert("RGB")
    picture.thumbnail((longest_side, longest_side))
    return picture
