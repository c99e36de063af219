"""Text for a log line: of one line, bounded, without whole keys."""

import pytest

from producer.wire.log_text import MAX_TEXT, clean, shorten_keys

KEY = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, with ümläuts and 漢字", "plain, with ümläuts and 漢字"),
        ("two\nlines\r\nand\ta tab", r"two\nlines\r\nand\ta tab"),
        ("\x1b[31mred\x00\x7f\x9b", r"\x1b[31mred\x00\x7f\x9b"),
        ("a\u2028b\u2029c\u202ed", r"a\u2028b\u2029c\u202ed"),
        ("\udcff", r"\udcff"),
        (f"no {KEY} here", "no 0123456789abcdef… here"),
        (f"{KEY}0 is none", f"{KEY}0 is none"),
    ],
)
def test_what_a_line_has(text: str, expected: str) -> None:
    assert clean(text) == expected
    assert clean(text).isprintable()


def test_it_is_bounded() -> None:
    assert len(clean("x" * 10_000)) == MAX_TEXT + 1
    assert clean("abcdef", most=3) == "abc…"


def test_keys_beside_each_other() -> None:
    assert shorten_keys(f"{KEY} {KEY}") == "0123456789abcdef… 0123456789abcdef…"
