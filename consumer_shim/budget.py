"""How much may be sent again: one budget for all requests of a process, so that retries make no failure worse."""

import threading
import time
from collections.abc import Callable


class RetryBudget:
    """A token for each call that is made again; first calls bring a share of one. Any thread may call it.

    Of n first calls in s seconds, at most `most` + n · `share` + s · `floor` / `window_s` are made again.
    """

    def __init__(
        self,
        *,
        share: float = 0.2,
        floor: float = 10.0,
        window_s: float = 10.0,
        most: float = 100.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`floor` tokens are there at the start, and again `window_s` after they were spent; `most` are ever saved."""
        self._share = share
        self._floor = floor
        self._window_s = window_s
        self._most = most
        self._clock = clock
        self._tokens = floor
        self._filled_s = clock()
        self._lock = threading.Lock()

    def deposit(self) -> None:
        """A first call is made."""
        with self._lock:
            self._fill()
            self._tokens = min(self._most, self._tokens + self._share)

    def take(self) -> bool:
        """Whether one more call may be made again; the token is spent then."""
        with self._lock:
            self._fill()
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True

    def _fill(self) -> None:
        now_s = self._clock()
        if self._tokens < self._floor:
            grown = self._floor / self._window_s * (now_s - self._filled_s)
            self._tokens = min(self._floor, self._tokens + grown)
        self._filled_s = now_s


PROCESS = RetryBudget()
"""The one that all clients of this process share."""
