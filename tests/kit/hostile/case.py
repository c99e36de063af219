"""One hostile or odd file, and what must become of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

ACCEPTED = ""
"""The outcome of a file that is encoded; others are the names of the reasons for which one is refused."""
UNREADABLE = "MEDIA_UNREADABLE"
TOO_LARGE = "MEDIA_TOO_LARGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    modality: str
    """`image`, `video` or `audio`: what the sender says that it is."""
    name: str
    data: bytes = field(repr=False)
    outcome: str
    stricter: str = ""
    """Why it is refused although plain vLLM takes it; empty where both agree."""


def accepted(modality: str, files: dict[str, bytes]) -> Iterator[Case]:
    """Cases of files that are encoded, by name."""
    for name, data in files.items():
        yield Case(modality=modality, name=name, data=data, outcome=ACCEPTED)


def refused(modality: str, outcome: str, files: dict[str, bytes], *, stricter: str = "") -> Iterator[Case]:
    """Cases of files that are refused for the reason `outcome`, by name."""
    for name, data in files.items():
        yield Case(modality=modality, name=name, data=data, outcome=outcome, stricter=stricter)
