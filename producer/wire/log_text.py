"""Text as a log line may have it: of one line, bounded, without what may not be in it."""

import re

MAX_TEXT = 2000
"""Characters of a message; more are cut off."""

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_KEY = re.compile(r"(?<![0-9a-f])([0-9a-f]{16})[0-9a-f]{48}(?![0-9a-f])")
"""A content key, of which a line has 16 digits; so have fingerprints, which look the same."""


def clean(text: str, *, most: int = MAX_TEXT) -> str:
    """`text` without line breaks, terminal controls and whole content keys, and of at most `most` characters."""
    if len(text) > most:
        text = text[:most] + "…"
    return _UNPRINTABLE.sub(_escaped, shorten_keys(text))


def shorten_keys(text: str) -> str:
    """`text` with only the first 16 digits of each content key."""
    return _KEY.sub(r"\1…", text)


def _escaped(match: "re.Match[str]") -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode()
