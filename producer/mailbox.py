"""From other threads to the event loop: what comes while the loop is busy costs it one wake-up together."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

LetterT = TypeVar("LetterT")


class Mailbox(Generic[LetterT]):
    """Letters in the order in which they were posted. Who posts bounds how many there are."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[LetterT], None]) -> None:
        """`deliver` is called on `loop` with each letter, and does not raise."""
        self.loop = loop
        self._deliver = deliver
        self._letters: deque[LetterT] = deque()
        self._is_woken = False

    def post(self, letter: LetterT) -> None:
        """Any thread may call it. What is posted to a loop that has ended is lost with it."""
        self._letters.append(letter)
        if self._is_woken:  # set back before the letters are taken, so that none is left behind
            return
        self._is_woken = True
        try:
            self.loop.call_soon_threadsafe(self._take)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def _take(self) -> None:
        self._is_woken = False
        while self._letters:
            self._deliver(self._letters.popleft())
