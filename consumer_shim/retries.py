"""Which items of an Encode are sent again, and when: pure bookkeeping for the synchronous and the asynchronous client.

Sent again is what had no room or reached nobody, as far as the retry budget of the process goes. An Encode has no
effect but on the pool, so sending it twice is safe.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

import grpc

from consumer_shim import budget
from consumer_shim.budget import RetryBudget
from consumer_shim.errors import ProducerError
from producer.wire.pb import encoder_cache_pb2 as pb

MAX_ATTEMPTS = 3
_FIRST_DELAY_S = 0.05


class Attempts:
    """One client call: the outcomes so far. Its deadline holds for all attempts together."""

    def __init__(
        self,
        items: Sequence[pb.MediaItem],
        timeout_s: float,
        *,
        most: int = MAX_ATTEMPTS,
        is_again: bool = False,
        retries: RetryBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """At most `most` attempts, of which the first is a retry already if `is_again`.

        `retries` is the process's budget by default; `uniform` spreads the waits of many clients.
        """
        self._items = items
        self._most = most
        self._budget = retries or budget.PROCESS
        self._clock = clock
        self._uniform = uniform
        if not is_again:
            self._budget.deposit()
        self._deadline_s = clock() + timeout_s
        self._outcomes: dict[int, pb.Ticket | ProducerError] = {}
        self._pending = list(range(len(items)))
        self._num = 0

    @property
    def items(self) -> list[pb.MediaItem]:
        """What to send now."""
        return [self._items[place] for place in self._pending]

    @property
    def left_s(self) -> float:
        """Seconds that the next attempt may take."""
        return max(0.0, self._deadline_s - self._clock())

    @property
    def outcomes(self) -> list[pb.Ticket | ProducerError]:
        """One an item, in order; after the last attempt."""
        return [self._outcomes[place] for place in range(len(self._items))]

    def take(self, outcomes: Iterable[pb.Ticket | ProducerError]) -> float | None:
        """The answer of an attempt. Seconds to wait before the next one; None where there is none.

        Raises:
            ProducerError: it answers for another number of items.
        """
        found = list(outcomes)
        if len(found) != len(self._pending):
            raise ProducerError(
                grpc.StatusCode.INTERNAL, "", f"the producer answered for {len(found)} of {len(self._pending)} items"
            )
        answered = dict(zip(self._pending, found, strict=True))
        self._outcomes |= answered
        refused = {place: one for place, one in answered.items() if _is_retryable(one)}
        return self._again(list(refused), *refused.values())

    def failed(self, error: ProducerError) -> float | None:
        """An attempt failed as a whole. Seconds to wait before the next one; None where there is none.

        Raises:
            ProducerError: `error`, where there is none and no item has an outcome of its own.
        """
        delay_s = self._again(self._pending, error) if _is_retryable(error) else None
        if delay_s is None:
            if not self._outcomes:
                raise error
            self._outcomes |= dict.fromkeys(self._pending, error)
        return delay_s

    def _again(self, places: list[int], *errors: ProducerError) -> float | None:
        self._num += 1
        hints = [error.retry_delay_s for error in errors]
        delay_s: float = max([_FIRST_DELAY_S * 2**self._num, *hints]) * self._uniform(1.0, 1.5)
        if not places or self._num >= self._most or delay_s >= self.left_s or not self._budget.take():
            return None
        self._pending = places
        return delay_s


def _is_retryable(outcome: pb.Ticket | ProducerError) -> TypeGuard[ProducerError]:
    return isinstance(outcome, ProducerError) and outcome.is_retryable
