"""The content key: equal for equal media, and for nothing else."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from producer.wire.content_key import content_key

FINGERPRINT = "f" * 64
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
