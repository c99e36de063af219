"""The contract of a transport: an outlet beside the pool, a reader beside the landing region.

A transport moves a block's bytes and vouches for nothing: the reader of the block checks it (`producer.wire.block`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass


class TransportError(Exception):
    """The bytes did not come. `settled` says whether the landing memory may be reused at once."""

    def __init__(self, message: str, *, settled: bool = True, timed_out: bool = False) -> None:
        super().__init__(message)
        self.settled = settled
        self.timed_out = timed_out


class TransportUnavailableError(Exception):
    """The transport cannot be used in this process; the message says what is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDescriptor:
    """Where a leased block lies, for one transport (`ec_producer.v1.Descriptor`)."""

    transport: str
    lease_id: str
    address: int
    num_bytes: int
    generation: int
    peer: str
    peer_metadata: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A producer's end: what the transport adds to a block's offset, if it reads by address; its name and metadata."""

    base: int | None
    peer: str
    metadata: bytes


class Outlet(ABC):
    """The producer's end. Thread-safe."""

    name: str

    @abstractmethod
    def describe(self) -> Endpoint:
        """What a reader needs to reach this end.

        Raises:
            TransportError: the transport is down at the moment.
        """

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """Whether readers can read now."""

    @abstractmethod
    def close(self) -> None:
        """Ends the transport; reads in flight fail."""


class Reader(ABC):
    """The consumer's end; it writes into its landing region only. Thread-safe."""

    name: str

    @abstractmethod
    def read(self, block: BlockDescriptor, offset: int, timeout_s: float) -> None:
        """Reads the whole of `block` to `offset` in the landing region, within `timeout_s` seconds.

        Raises:
            TransportError: it did not; where the error is not `settled`, `is_settled` says when the memory is free.
        """

    @abstractmethod
    def is_settled(self, offset: int) -> bool:
        """Whether nothing can be written at `offset` any more by a read that failed unsettled."""

    @abstractmethod
    def close(self) -> None:
        """Ends the transport; reads in flight fail."""
