"""A dict that keeps what was put into it last."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Recent(Generic[_K, _V]):
    """At most `most` entries, of which the oldest goes. Any thread may call it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[_K, _V] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, entries: Mapping[_K, _V]) -> None:
        with self._lock:
            for key, value in entries.items():
                self._entries[key] = value
                self._entries.move_to_end(key)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)

    def find(self, keys: Iterable[_K]) -> list[_V]:
        """The values of those `keys` that are there, in their order and of one moment."""
        with self._lock:
            return [self._entries[key] for key in keys if key in self._entries]
