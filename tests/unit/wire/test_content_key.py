"""The content key: equal for equal media, and for nothing else."""

import hashlib
import io
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from producer.wire.content_key import content_key
from tests.kit.clips import sounds, videos
from tests.kit.media import Media
from tests.kit.photos import photos

FINGERPRINT = "f" * 64
MODALITIES = ("image", "video", "audio")
Form = tuple[tuple[int, ...], float]
Item = tuple[str, bytes, Form | None]
"""Modality, bytes, and the form of what was decoded."""
inputs = st.tuples(st.text("0123456789abcdef|", max_size=8), st.sampled_from(["image", "video"]), st.binary(max_size=8))


def test_is_64_hex_digits() -> None:
    key = content_key(FINGERPRINT, "image", b"photo")
    assert len(bytes.fromhex(key)) == 32
    assert key == key.lower()


def test_another_process_computes_the_same() -> None:
    code = f"from producer.wire.content_key import content_key; print(content_key({FINGERPRINT!r}, 'image', b'photo'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == content_key(FINGERPRINT, "image", b"photo")


def test_every_part_counts() -> None:
    keys = [
        content_key(FINGERPRINT, "image", b"photo"),
        content_key("e" * 64, "image", b"photo"),
        content_key(FINGERPRINT, "video", b"photo"),
        content_key(FINGERPRINT, "image", b"photo "),
        content_key(FINGERPRINT, "image", b""),
    ]
    assert len(set(keys)) == len(keys)


@given(inputs, inputs)
def test_no_part_can_pass_for_another(one: tuple[str, str, bytes], other: tuple[str, str, bytes]) -> None:
    assert (content_key(*one) == content_key(*other)) == (one == other)


@pytest.mark.parametrize("num_bytes", [0, 1, 2046, 2047, 2048, 4094, 65535, 65536, 65537, 200_000])
def test_it_is_the_hash_of_all_bytes_however_many_they_are(num_bytes: int) -> None:
    """They are hashed in pieces, or at once."""
    data = bytes(number % 251 for number in range(num_bytes))
    text = f"ec-producer key 1|{FINGERPRINT}|image|{num_bytes}|".encode()
    assert content_key(FINGERPRINT, "image", data) == hashlib.sha256(text + data).hexdigest()


# What a client decoded


sizes = st.integers(0, 2**32 - 1) | st.integers(0, 12)
rates = st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.5, 1.0, 5.0, 16000.0]
)
forms = st.none() | st.tuples(st.lists(sizes, max_size=5).map(tuple), rates)
items = st.tuples(st.sampled_from(MODALITIES), st.binary(max_size=4), forms)


def key(item: Item) -> str:
    return content_key(FINGERPRINT, *item)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Item, Item]:
    """Two items that have as much in common as not."""
    one, other = draw(items), draw(items)
    kept = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    return one, tuple(mine if keep else theirs for mine, theirs, keep in zip(one, other, kept, strict=True))


@given(pairs())
def test_keys_are_equal_exactly_when_modality_bytes_and_form_are(pair: tuple[Item, Item]) -> None:
    one, other = pair
    assert (key(one) == key(other)) == (one == other)


@given(st.sampled_from(MODALITIES), st.binary(max_size=8), forms.filter(bool), st.text("0123456789x/.|", max_size=12))
def test_what_was_decoded_never_passes_for_a_file(modality: str, data: bytes, form: Form, text: str) -> None:
    """Neither of its own bytes, nor of others that begin as a form is written."""
    decoded = key((modality, data, form))
    assert decoded != key((modality, data, None))
    assert decoded != key((modality, text.encode() + data, None))


@given(st.lists(sizes, min_size=1, max_size=5), rates, rates)
def test_shape_and_rate_count(shape: list[int], rate_hz: float, other_hz: float) -> None:
    def of(shape: list[int], rate_hz: float) -> str:
        return content_key(FINGERPRINT, "video", b"pixels", (shape, rate_hz))

    assert (of(shape, rate_hz) == of(shape, other_hz)) == (rate_hz == other_hz)
    assert of(shape, rate_hz) == of(tuple(shape), rate_hz)
    assert of(shape, rate_hz) not in (of([*shape, 1], rate_hz), of([1, *shape], rate_hz), of(shape[1:], rate_hz))
    assert (of(shape, rate_hz) == of(shape[::-1], rate_hz)) == (shape == shape[::-1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((1, 12), 1.0), ((11, 2), 1.0)),
        (((1, 1), 21.0), ((1, 12), 1.0)),
        (((2, 3, 3), 0.0), ((3, 2, 3), 0.0)),
        (((6, 1, 3), 0.0), ((3, 2, 3), 0.0)),
        (((16,), 0.1), ((16,), math.nextafter(0.1, 1))),
        (((16,), 1e22), ((16,), math.nextafter(1e22, math.inf))),
    ],
    ids=str,
)
def test_forms_that_read_alike_have_keys_of_their_own(one: Form, other: Form) -> None:
    assert key(("audio", b"bytes", one)) != key(("audio", b"bytes", other))


# Real media


def every_media() -> list[Media]:
    return [*photos().values(), *videos().values(), *sounds().values()]


def reencoded() -> list[Item]:
    """One photograph in forms that a client may send it in: files, and pixels under several shapes."""
    picture = Image.open(io.BytesIO(photos()["retina.png"].data)).convert("RGB")
    files = []
    for kind, options in (
        ("PNG", {}),
        ("PNG", {"compress_level": 0}),
        ("JPEG", {}),
        ("JPEG", {"quality": 90}),
        ("BMP", {}),
    ):
        file = io.BytesIO()
        picture.save(file, kind, **options)
        files.append(file.getvalue())
    pixels = np.asarray(picture)
    height, width, _ = pixels.shape
    shapes: list[Form] = [((height, width, 3), 0.0), ((height * 2, width // 2, 3), 0.0), ((height, width, 3), 1.0)]
    return [*(("image", data, None) for data in files), *(("image", pixels.tobytes(), shape) for shape in shapes)]


def test_every_media_file_and_every_way_to_send_it_has_a_key_of_its_own() -> None:
    found: list[Item] = [(media.modality, media.data, None) for media in every_media()]
    found += [(modality, data, None) for (_, data, _), modality in itertools.product(found, MODALITIES)]
    found += reencoded()
    found += [(modality, data, ((len(data),), 1.0)) for modality, data, _ in found]
    distinct = {
        (modality, hashlib.sha256(data).digest(), form): key((modality, data, form)) for modality, data, form in found
    }
    assert len(set(distinct.values())) == len(distinct) > 100


def test_a_file_read_again_has_the_same_key() -> None:
    for media in every_media():
        copies = (media.data, bytes(bytearray(media.data)))
        assert len({key((media.modality, data, None)) for data in copies}) == 1


def test_one_bit_of_a_file_counts() -> None:
    for media in every_media():
        changed = bytearray(media.data)
        changed[len(changed) // 2] ^= 1
        assert key((media.modality, bytes(changed), None)) != key((media.modality, media.data, None))
