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


_ANY_JSON = (
    *("JSONDecodeError", "UnicodeDecodeError", "RecursionError", "TypeError", "KeyError", "ValueError", "Error"),
    *("AttributeError", "IndexError"),
)
KNOWN: tuple[Known, ...] = (
    Known("side_channel", "finding-answer-of-one", "ask_reason", ("TypeError",)),
    Known("side_channel", "finding-answer-of-another-kind", "_ask", ("Finding",)),
    Known("side_channel", "finding-deep-answer", "_exchange", ("RecursionError",)),
    Known("transports", "finding-hello-without-metadata", "_start", _ANY_JSON),
    Known("transports", "finding-hello-of-another-kind", "_hello", ("Finding",)),
    Known("transports", "finding-answer-no-json", "_take_answers", _ANY_JSON),
    Known("transports", "finding-error-of-another-kind", "_answers", ("Finding",)),
    Known("settings", "finding-deep-object", "parse_object", ("RecursionError",)),
    Known("settings", "finding-address-of-brackets", "_address", ("Finding",)),
    Known("answers", "finding-lease-without-end", "acquire", ("OverflowError",)),
)


def is_known(target: str, error: BaseException) -> bool:
    """Whether the error is one of a known finding."""
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    return any(
        one.target == target and type(error).__name__ in one.errors and one.function in functions for one in KNOWN
    )
