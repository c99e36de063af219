"""Ids that nobody can guess, of the system's randomness."""

import os
from collections import deque

_ID_BYTES = 16
_STOCK = 64
_ready: deque[str] = deque()


def random_id() -> str:
    """32 hex digits, never the same twice. Any thread may call it.

    Asking the system lets go of Python's lock, which a busy thread then has to wait for; so it is asked once for many.
    """
    while True:
        try:
            return _ready.pop()
        except IndexError:
            digits = os.urandom(_STOCK * _ID_BYTES).hex()
            _ready.extend(digits[start : start + 2 * _ID_BYTES] for start in range(0, len(digits), 2 * _ID_BYTES))


os.register_at_fork(after_in_child=_ready.clear)
