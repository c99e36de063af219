"""What a case found, the table of all of it, and the verdict. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MAX_NOTES = 5
"""Sentences kept for one case; counts go on."""


@dataclass(slots=True, kw_only=True)
class Record:
    """One case: what was tried, how each try ended, and what must not have happened."""

    name: str
    """Suite and case, as `load/overload`."""
    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Tries that ended, by code."""
    hung: int = 0
    """Tries that had not ended by their deadline and the stated slack."""
    wrong: int = 0
    """Other bytes than before, other outcomes than allowed, counts that do not agree."""
    leaked: int = 0
    """Leases, blocks, queue places, files, threads, processes and memory that were not given back."""
    notes: list[str] = field(default_factory=list)
    """What the three counts stand for, in words."""

    def ended(self, code: str) -> None:
        """A try ended in `code`."""
        self.outcomes[code] += 1

    def expect(self, holds: bool, sentence: str) -> None:
        """What must hold; else it is wrong."""
        if not holds:
            self.wrong += 1
            self._note(f"wrong: {sentence}")

    def hangs(self, sentence: str, number: int = 1) -> None:
        """So many tries have not ended in time, or at least something else has not."""
        self.hung += number
        self._note(f"hung: {sentence}")

    def leaks(self, number: int, sentence: str) -> None:
        """So many things were not given back; none is no leak."""
        if number:
            self.leaked += number
            self._note(f"leaked: {sentence}")

    @property
    def lost(self) -> int:
        """Tries without an outcome, or with more than one."""
        return abs(self.tried - self.outcomes.total() - self.hung)

    @property
    def is_clean(self) -> bool:
        """Whether something was tried, and all of it ended as it must."""
        return bool(self.tried) and not (self.lost or self.hung or self.wrong or self.leaked)

    def _note(self, sentence: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(sentence)


def failures(records: Sequence[Record]) -> Iterator[str]:
    """One line for each reason why the contract does not hold; a case that tried nothing shows nothing."""
    if not records:
        yield "no case ran"
    for record in records:
        if not record.tried:
            yield f"{record.name}: nothing was tried"
        if record.lost:
            ended = record.outcomes.total()
            yield f"{record.name}: {record.tried} tried, {ended} ended, {record.hung} hung: {record.lost} do not agree"
        if record.hung or record.wrong or record.leaked:
            yield f"{record.name}: {record.hung} hung, {record.wrong} wrong, {record.leaked} leaked"
        yield from (f"{record.name}: {note}" for note in record.notes)


def lines(records: Sequence[Record]) -> Iterator[str]:
    """The table, ready to print; a try that was lost counts as hung."""
    width = max((len(record.name) for record in records), default=4)
    yield f"{'case':{width}}  tried   hung  wrong  leaked  outcomes"
    for record in records:
        outcomes = ", ".join(f"{code} {number}" for code, number in record.outcomes.most_common())
        yield (
            f"{record.name:{width}}  {record.tried:5}  {record.hung + record.lost:5}  {record.wrong:5}"
            f"  {record.leaked:6}  {outcomes}"
        )


def verdict(records: Sequence[Record]) -> str:
    """The last line: whether all of it holds."""
    return "CONTRACT BROKEN" if any(failures(records)) else "CONTRACT OK"
