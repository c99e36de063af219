"""Pictures to send: JPEGs that are all different, and the same ones for the same seed on every machine.

They are blurred noise: about as large as photographs of their size, and as much work to decode.
"""

import io
from collections.abc import Iterator
from itertools import count

import numpy as np
from PIL import Image

QUALITY = 90
BLUR = 16
"""Pixels from one random colour to the next."""


def picture(seed: int, number: int, side: int) -> bytes:
    """A JPEG of `side` × `side` pixels, which is of no other seed, number or side."""
    if side < BLUR:
        raise ValueError(f"side is {side}; allowed is {BLUR} or more")
    draw = np.random.default_rng((seed, number, side))
    colours = draw.integers(0, 256, (side // BLUR, side // BLUR, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colours).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def pictures(seed: int, side: int) -> Iterator[bytes]:
    """Without end, none of them twice: both servers keep what they have seen, and would answer from that."""
    return (picture(seed, number, side) for number in count())
