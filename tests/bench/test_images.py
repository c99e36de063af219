"""The pictures of the bench: the same each time, and none twice."""

import io
from itertools import islice

import pytest
from PIL import Image

from bench.images import picture, pictures

SIDE = 64


def test_they_are_the_same_each_time() -> None:
    assert [*islice(pictures(3, SIDE), 5)] == [*islice(pictures(3, SIDE), 5)]


def test_none_comes_twice() -> None:
    made = [*islice(pictures(3, SIDE), 100), *islice(pictures(4, SIDE), 100), *islice(pictures(3, SIDE + 1), 100)]
    assert len(set(made)) == 300


def test_they_are_square_jpegs_that_are_not_flat() -> None:
    image = Image.open(io.BytesIO(picture(3, 0, SIDE)))
    assert (image.format, image.size, image.mode) == ("JPEG", (SIDE, SIDE), "RGB")
    assert all(high - low > 100 for low, high in image.getextrema())


def test_a_side_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="side is 15; allowed is 16 or more"):
        picture(3, 0, 15)
