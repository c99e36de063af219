"""Which producer an item goes to: rendezvous hashing by content, and who is passed over for a while. Does no IO.

Each item ranks the producers by a hash of itself and their address. So a repeated item finds its embedding where it was
encoded, and a producer that comes or goes moves only the items that rank it first.
"""

import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, TypeVar

import grpc

from consumer_shim.errors import ProducerError
from producer.wire.pb import encoder_cache_pb2 as pb

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_SILENCE_S = 10.0
"""A producer that has calls to answer, and answered none for so long, may be stuck."""


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A call under way; a probe is the only one that finds out whether a suspect is well again."""

    began_s: float
    is_probe: bool


class Health:
    """What is known of one producer. For one event loop.

    One that could not be reached, that takes no work or that stays silent is a suspect: it is passed over for a pause,
    which doubles with each probe that fails; then one probe at a time is let through. Any answer clears it.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`uniform` spreads the pauses of many clients."""
        self._clock = clock
        self._uniform = uniform
        self._calls: dict[Call, None] = {}  # in the order in which they began
        self._num_failures = 0
        self._heard_s = -float("inf")
        self.closed_until_s = -float("inf")
        """The end of the last pause, on the clock."""

    @property
    def is_open(self) -> bool:
        """Whether a call may begin."""
        if not self._is_suspect:
            return True
        return self._clock() >= self.closed_until_s and not any(call.is_probe for call in self._calls)

    def begin(self) -> Call:
        """A call begins, whether or not it should; it must end with `end`."""
        call = Call(self._clock(), is_probe=self._is_suspect and self.is_open)
        self._calls[call] = None
        return call

    def end(self, call: Call) -> None:
        """The call is over, whatever came of it."""
        del self._calls[call]

    def answered(self) -> None:
        """It said something that shows it at work."""
        self._heard_s = self._clock()
        self._num_failures = 0
        self.closed_until_s = -float("inf")

    def failed(self, call: Call, error: ProducerError) -> None:
        """A call ended in an error of the whole call, which may be an answer, too."""
        if error.code is grpc.StatusCode.CANCELLED:
            return  # on this side
        if not (error.is_down or error.is_silence):
            self.answered()
            return
        is_slow_only = error.is_silence and self._heard_s >= call.began_s
        is_known = self._num_failures > 0 and not call.is_probe  # the others of one failure do not lengthen the pause
        if not is_slow_only and not is_known:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._num_failures, 10))
            self._num_failures += 1
            self.closed_until_s = self._clock() + pause_s * self._uniform(0.75, 1.25)

    @property
    def _is_suspect(self) -> bool:
        oldest = next(iter(self._calls), None)
        if self._num_failures or oldest is None:
            return self._num_failures > 0
        return self._clock() - max(oldest.began_s, self._heard_s) >= _SILENCE_S


class Peer(Protocol):
    """A producer as far as it is looked at here."""

    address: str
    health: Health


P = TypeVar("P", bound=Peer)


def item_digest(item: pb.MediaItem) -> bytes:
    """What routes an item: a digest of all that the client has of it. Takes a millisecond a MiB."""
    decoded = item.decoded
    form = (list(decoded.shape), decoded.rate_hz) if item.HasField("decoded") else None
    found = blake2b(f"{item.modality} {form} ".encode(), digest_size=16)
    found.update(decoded.data if form else item.data)
    return found.digest()


def rank(peers: Iterable[P], digest: bytes) -> list[P]:
    """The producers in the order in which an item prefers them; the same in every process."""
    return sorted(peers, key=lambda peer: _weight(peer.address, digest), reverse=True)


def assign(
    digests: Sequence[bytes], places: Iterable[int], peers: Sequence[P], tried: Collection[P]
) -> dict[P, list[int]]:
    """The items at `places` by the producer that each goes to; those that none is left for are missing.

    Args:
        digests: of all items.
        places: which of them to assign.
        peers: all producers.
        tried: those that had these items already. Without any, an item goes to the least bad where all are passed over.
    """
    groups: dict[P, list[int]] = {}
    left = [peer for peer in peers if peer not in tried]
    is_open = {peer: peer.health.is_open for peer in left}  # once, so that a probe takes all that come together
    for place in places:
        ranked = rank(left, digests[place])
        found = next((peer for peer in ranked if is_open[peer]), None)
        if found is None and not tried:
            found = min(ranked, key=lambda peer: peer.health.closed_until_s, default=None)
        if found is not None:
            groups.setdefault(found, []).append(place)
    return groups


def _weight(address: str, digest: bytes) -> bytes:
    return blake2b(digest, digest_size=8, key=blake2b(address.encode(), digest_size=16).digest()).digest()
