"""What each client has in hand, and no more than its share. For one thread."""

from producer.errors import OverloadedError
from producer.wire.contract import Reason


class Clients:
    """Counts items by client. It remembers those only that have one in hand."""

    def __init__(self, most: int) -> None:
        """`most` items in hand at once for each client; 0 for no limit."""
        self._most = most
        self._items: dict[str, int] = {}

    def __len__(self) -> int:
        """Clients with items in hand."""
        return len(self._items)

    def permit(self, client: str) -> "Permit":
        """For one item of `client`, as long as it is in hand: within the `with` that this is for.

        Raises:
            OverloadedError: the client has as many already as it may.
        """
        if self._most and self._items.get(client, 0) >= self._most:
            raise OverloadedError(
                Reason.CLIENT_LIMIT, f"the client has {self._most} items in hand already, as many as one may"
            )
        return Permit(self._items, client)


class Permit:
    """Counts an item of a client as long as it is in hand."""

    __slots__ = ("_client", "_items")

    def __init__(self, items: dict[str, int], client: str) -> None:
        self._items = items
        self._client = client

    def __enter__(self) -> None:
        self._items[self._client] = self._items.get(self._client, 0) + 1

    def __exit__(self, *error: object) -> None:
        left = self._items.pop(self._client) - 1
        if left:
            self._items[self._client] = left
