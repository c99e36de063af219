"""Findings that are not fixed yet: a run passes over them, and the test of each one's input is expected to fail.

A fix takes its entry from here; the input stays in the corpus.
"""

import traceback
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """A finding: the target and the file of its corpus, and the function that raises one of these errors."""

    target: str
    file: str
    function: str
    errors: tuple[str, ...]


KNOWN: tuple[Known, ...] = ()


def is_known(target: str, error: BaseException) -> bool:
    """Whether the error is one of a known finding."""
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    return any(
        one.target == target and type(error).__name__ in one.errors and one.function in functions for one in KNOWN
    )
