"""The kinds of errors that came last, for people who look: no message, which may quote what a client sent."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RecentError:
    """How often an error of one code and reason came, and when last."""

    scope: str
    """"item" for an item's outcome, "call" where a whole call was refused."""
    code: str  # a gRPC status code's name
    reason: str
    count: int
    last_s: float  # Unix time


class RecentErrors:
    """A ring of the last `max_kinds` kinds; one that comes again moves to the front. Thread-safe."""

    def __init__(self, max_kinds: int = 20, clock: Callable[[], float] = time.time) -> None:
        self._max_kinds = max_kinds
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[str, str, str], RecentError] = OrderedDict()

    def add(self, scope: str, code: str, reason: str) -> None:
        """One more of its kind, now."""
        with self._lock:
            before = self._kinds.pop((scope, code, reason), None)
            count = 1 + (before.count if before else 0)
            self._kinds[scope, code, reason] = RecentError(
                scope=scope, code=code, reason=reason, count=count, last_s=self._clock()
            )
            if len(self._kinds) > self._max_kinds:
                self._kinds.popitem(last=False)

    def newest_first(self) -> list[RecentError]:
        with self._lock:
            return list(reversed(self._kinds.values()))
