"""What ends code that takes too long, in the main thread, by a timer's signal."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

WALL = (signal.ITIMER_REAL, signal.SIGALRM)
CPU = (signal.ITIMER_PROF, signal.SIGPROF)
"""Which timer, of the time that passes or that the process computes; and the signal that it sends."""


@contextmanager
def raising_after(seconds: float, error: BaseException, clock: tuple[int, signal.Signals] = WALL) -> Iterator[None]:
    """Raises `error` in the body after more than 0 `seconds`, where that is Python code by then."""
    timer, number = clock

    def end(*_: object) -> None:
        raise error

    before = signal.signal(number, end)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
