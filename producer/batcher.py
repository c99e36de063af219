"""Packs waiting items into encoder steps. Pure: no clock, no thread. Nobody waits for a step to fill."""

import contextlib
from collections import deque
from typing import Generic, Protocol, TypeVar


class Batchable(Protocol):
    """What the batcher reads of an item."""

    @property
    def modality(self) -> str: ...
    @property
    def num_rows(self) -> int: ...


ItemT = TypeVar("ItemT", bound=Batchable)


class Batcher(Generic[ItemT]):
    """A first-in, first-out queue that is emptied by steps of one modality. Not thread-safe."""

    def __init__(self, *, max_rows: int, max_items: int) -> None:
        """Steps have at most `max_rows` rows and `max_items` items; a larger item has a step of its own."""
        self._max_rows = max_rows
        self._max_items = max_items
        self._waiting: deque[ItemT] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: ItemT) -> None:
        """Puts `item` at the end of the queue."""
        self._waiting.append(item)

    def discard(self, item: ItemT) -> None:
        """Takes `item` out of the queue, if it is there."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(item)

    def take(self) -> list[ItemT]:
        """The next step: the oldest item and those behind it, of its modality, that fit. Empty if none waits.

        The first that does not fit closes the step, so that a large item is never overtaken for ever.
        """
        step: list[ItemT] = []
        rest: deque[ItemT] = deque()
        rows = 0
        while self._waiting:
            item = self._waiting[0]
            if step and item.modality == step[0].modality:
                if len(step) >= self._max_items or rows + item.num_rows > self._max_rows:
                    break
            elif step:
                rest.append(self._waiting.popleft())
                continue
            step.append(self._waiting.popleft())
            rows += item.num_rows
        self._waiting.extendleft(reversed(rest))
        return step
