"""The photographs are real, small, and both formats are there."""

import base64
import io

import pytest
from PIL import Image

from tests.kit.photos import FORMATS, SOURCES, Photo, photos


@pytest.fixture(params=sorted(photos()))
def photo(request: pytest.FixtureRequest) -> Photo:
    return photos()[request.param]


def test_decodes_as_its_name_and_mime_say(photo: Photo) -> None:
    picture = Image.open(io.BytesIO(photo.data))
    assert (picture.format, photo.mime) == FORMATS[photo.name.rpartition(".")[2]]
    assert 100 <= max(picture.size) <= 256
    assert picture.mode == "RGB"


def test_shows_something(photo: Photo) -> None:
    colours = Image.open(io.BytesIO(photo.data)).getcolors(maxcolors=1 << 18)
    assert colours is not None
    assert len(colours) > 1000


def test_data_url_carries_the_bytes(photo: Photo) -> None:
    head, _, body = photo.data_url.partition(",")
    assert head == f"data:{photo.mime};base64"
    assert base64.b64decode(body) == photo.data


def test_every_subject_in_every_format() -> None:
    assert len({photo.data for photo in photos().values()}) == len(SOURCES) * len(FORMATS)
