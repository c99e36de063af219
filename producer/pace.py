"""How fast items are finished, to tell at once what cannot be done in time. Pure; for one thread."""

from collections import deque

_WINDOW = 64
_LEAST = 8
"""Fewer finished items say nothing yet."""


class Pace:
    """Seconds of work for each of the last finished items; time without work does not count."""

    def __init__(self) -> None:
        self._spent_s: deque[float] = deque(maxlen=_WINDOW)
        self._since_s = 0.0

    def begin(self, now_s: float) -> None:
        """Work begins after none was in hand."""
        self._since_s = now_s

    def finish(self, now_s: float) -> None:
        """An item was finished. Items of one step come together, which the window evens out."""
        self._spent_s.append(now_s - self._since_s)
        self._since_s = now_s

    def seconds_for(self, num_items: int) -> float:
        """About what so many items take from now on; 0 while too few were seen."""
        if len(self._spent_s) < _LEAST:
            return 0.0
        return num_items * sum(self._spent_s) / len(self._spent_s)
