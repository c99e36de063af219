"""What becomes known of a call while it is answered, for its line in the log and its span. For the event loop."""

from contextvars import ContextVar
from dataclasses import dataclass, field

Value = str | int | float


@dataclass(slots=True)
class CallNotes:
    """Of one call: names and numbers, never what a client sent; and its items' outcomes, each with how many had it."""

    fields: dict[str, Value] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)


_current: ContextVar[CallNotes | None] = ContextVar("call_notes", default=None)


def begin() -> CallNotes:
    """Notes of the call that this task answers; tasks that it begins write into the same."""
    notes = CallNotes()
    _current.set(notes)
    return notes


def add(**fields: Value) -> None:
    """Notes what is known now, where there is a call."""
    notes = _current.get()
    if notes is not None:
        notes.fields.update(fields)


def count(outcome: str) -> None:
    """One more item with this outcome."""
    notes = _current.get()
    if notes is not None:
        notes.outcomes[outcome] = notes.outcomes.get(outcome, 0) + 1
