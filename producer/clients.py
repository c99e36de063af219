"""What each client has in hand, and no more than its share. For one thread."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from producer.errors import OverloadedError
from producer.wire.contract import Reason


class Clients:
    """Counts items by client. It remembers those only that have one in hand."""

    def __init__(self, most: int) -> None:
        """`most` items in hand at once for each client; 0 for no limit."""
        self._most = most
        self._items: Counter[str] = Counter()

    def __len__(self) -> int:
        """Clients with items in hand."""
        return len(self._items)

    @contextmanager
    def permit(self, client: str) -> Iterator[None]:
        """For one item of `client`, as long as it is in hand.

        Raises:
            OverloadedError: the client has as many already as it may.
        """
        if self._most and self._items[client] >= self._most:
            raise OverloadedError(
                Reason.CLIENT_LIMIT, f"the client has {self._most} items in hand already, as many as one may"
            )
        self._items[client] += 1
        try:
            yield
        finally:
            self._items[client] -= 1
            if not self._items[client]:
                del self._items[client]
