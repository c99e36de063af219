"""A ticket on its way through vLLM: from the middleware to the connector inside `ec_transfer_params`."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from producer.wire.block import BlockIdentity, EmbeddingShape
from producer.wire.contract import DTYPE_BYTES, TICKETS_PARAM
from producer.wire.modality import modality_name
from producer.wire.pb import encoder_cache_pb2 as pb

_MAX_TICKETS = 4096
_MAX_ROWS = 1 << 24
_HEX = {
    "key": re.compile(r"[0-9a-f]{64}"),
    "epoch": re.compile(r"[0-9a-f]{16}"),
    "lease_id": re.compile(r"[0-9a-f]{0,64}"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PullTicket:
    """What a pull needs of a ticket. `address` is the producer's, as the shim is configured with it."""

    key: str
    modality: str
    num_rows: int
    width: int
    dtype: str
    epoch: str
    lease_id: str
    address: str

    def __post_init__(self) -> None:
        for name, pattern in _HEX.items():
            value = getattr(self, name)
            if not isinstance(value, str) or not pattern.fullmatch(value):
                raise ValueError(f"the ticket's {name} is {str(value)[:80]!r}; expected lower-case hex digits")
        for name in ("num_rows", "width"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= _MAX_ROWS:
                raise ValueError(f"the ticket's {name} is {str(value)[:80]}; allowed are 1 to {_MAX_ROWS}")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise ValueError(f"the ticket's dtype is {str(self.dtype)[:80]!r}; allowed are {', '.join(DTYPE_BYTES)}")
        if not isinstance(self.modality, str) or not isinstance(self.address, str):
            raise ValueError("the ticket's modality or address is not text")

    @property
    def shape(self) -> EmbeddingShape:
        return EmbeddingShape(num_rows=self.num_rows, width=self.width, dtype=self.dtype)

    @property
    def source(self) -> tuple[str, str, EmbeddingShape]:
        """Where its embedding is, and its shape: what one ticket meets, another of the same source would too."""
        return self.address, self.epoch, self.shape

    def identity(self, generation: int) -> BlockIdentity:
        """What the block of this ticket must say of itself."""
        return BlockIdentity(key=bytes.fromhex(self.key), epoch=int(self.epoch, 16), generation=generation)

    @classmethod
    def from_message(cls, ticket: pb.Ticket, address: str) -> "PullTicket":
        """The ticket that the producer at `address` answered with.

        Raises:
            ValueError: it is malformed.
        """
        return cls(
            key=ticket.key,
            modality=modality_name(ticket.modality),
            num_rows=ticket.num_rows,
            width=ticket.width,
            dtype=ticket.dtype,
            epoch=ticket.epoch,
            lease_id=ticket.lease_id,
            address=address,
        )


def to_params(tickets: list[PullTicket]) -> dict[str, Any]:
    """The part of `ec_transfer_params` that carries `tickets`, in the order of the request's media."""
    return {TICKETS_PARAM: [asdict(ticket) for ticket in tickets]}


def from_params(params: Mapping[str, Any] | None) -> list[PullTicket]:
    """The tickets in a request's `ec_transfer_params`; none if there are none.

    Raises:
        ValueError: they are malformed.
    """
    found = (params or {}).get(TICKETS_PARAM, [])
    if not isinstance(found, list) or len(found) > _MAX_TICKETS:
        raise ValueError(f"{TICKETS_PARAM} is not a list of at most {_MAX_TICKETS} tickets")
    try:
        return [PullTicket(**ticket) for ticket in found]
    except TypeError as error:
        raise ValueError(f"{TICKETS_PARAM}: {error}") from None
