"""Which ticket belongs to which media item of a request: by position, since the engine may name items as it likes."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from consumer_shim.tickets import PullTicket


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestItem:
    """A media item of a request, as the engine has it."""

    identifier: str
    """Under which the engine keeps the item's embedding."""
    modality: str
    end: int
    """Prompt position behind the item's last placeholder."""
    num_rows: int
    is_in_band: bool
    """It brings its own tensor; the shim leaves it alone."""


def pair(items: Sequence[RequestItem], tickets: Sequence[PullTicket]) -> list[tuple[RequestItem, PullTicket | None]]:
    """Each item with its ticket, None where it brings its own tensor: the nth with the nth of its modality.

    Where there are as many tickets as items, tensors only stand in for what the tickets name.
    """
    waiting: defaultdict[str, deque[PullTicket]] = defaultdict(deque)
    for ticket in tickets:
        waiting[ticket.modality].append(ticket)
    counts = Counter(item.modality for item in items)
    all_by_ticket = {modality for modality, count in counts.items() if len(waiting[modality]) == count}
    pairs: list[tuple[RequestItem, PullTicket | None]] = []
    for item in items:
        if item.is_in_band and item.modality not in all_by_ticket:
            pairs.append((item, None))
        elif waiting[item.modality]:
            pairs.append((item, waiting[item.modality].popleft()))
        else:
            raise ValueError(f"{item.modality} {item.identifier[:16]} brings neither an embedding nor a ticket for one")
    if any(waiting.values()):
        raise ValueError("the request has more tickets than media that wait for one")
    return pairs
