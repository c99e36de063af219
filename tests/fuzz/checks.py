"""What every target holds errors and results to."""

import re
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from tests.kit.timers import CPU, raising_after

MAX_MESSAGE = 400
"""Most characters of an error that a client is shown."""

_PLACES = {str(Path(place)) for place in (sys.prefix, sys.base_prefix + "/lib", tempfile.gettempdir(), Path.cwd())}
_LEAK = re.compile("|".join([r"(?<!\w)0x[0-9a-fA-F]{11,}", "object at ", "/proc/", *map(re.escape, sorted(_PLACES))]))


class Finding(AssertionError):
    """A target saw what must not be."""


class OverTimeError(BaseException):
    """An input took more than its time. No `except Exception` on the way hides it."""


def within(cpu_s: float) -> AbstractContextManager[None]:
    """Raises OverTimeError when Python code in the body has the process spend more seconds. For the main thread."""
    return raising_after(cpu_s, OverTimeError(f"an input takes more than {cpu_s} s"), CPU)


def expect(condition: object, what: str) -> None:
    """Raises Finding with `what` unless `condition` holds."""
    if not condition:
        raise Finding(what)


def check_said(message: str, data: bytes = b"", most: int = MAX_MESSAGE) -> None:
    """Raises Finding for an error's text that is empty, too long, no text, or gives away an address or path of ours.

    What stands in `data`, the input, is not ours.
    """
    expect(message, "an error says nothing")
    expect(len(message) <= most, f"an error has {len(message)} characters: {message[:100]}")
    leak = _LEAK.search(message)
    expect(leak is None or leak[0].encode() in data, f"an error gives away an address or path: {message}")
