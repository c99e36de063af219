"""What grpc.health.v1 says: SERVING while every part that an encode needs is seen to work. For the event loop."""

import logging
import time
from collections.abc import Callable, Mapping

from grpc_health.v1 import health, health_pb2

from producer.metrics import Metrics
from producer.wire.contract import SERVICE_NAME

logger = logging.getLogger(__name__)

_NAMES = ("", SERVICE_NAME)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Owns the status. A probe returns "" where its part works, else a sentence for the log."""

    def __init__(
        self, statuses: health.aio.HealthServicer, probes: Mapping[str, Callable[[], str]], metrics: Metrics
    ) -> None:
        self._statuses = statuses
        self._probes = probes
        self._up = {name: metrics.part_up.labels(name) for name in probes}
        self._status: int | None = None
        self.parts: Mapping[str, str] = {}
        """What each probe said last. Never changed, but replaced: other threads may read it."""
        self.checked_s: float | None = None
        """When that was, on the monotonic clock."""

    async def check(self) -> None:
        """Asks all probes and says what they say; to be called every second."""
        self.parts = {name: probe() for name, probe in self._probes.items()}
        self.checked_s = time.monotonic()
        troubles = {name: why for name, why in self.parts.items() if why}
        for name, gauge in self._up.items():
            gauge.set(name not in troubles)
        for name, why in troubles.items() if self._status is not _NOT_SERVING else ():
            logger.error("not serving: %s: %s", name, why)
        await self._report(_NOT_SERVING if troubles else _SERVING)

    async def stop(self) -> None:
        """NOT_SERVING for good; nothing is checked after this."""
        await self._report(_NOT_SERVING)

    async def _report(self, status: int) -> None:
        if status == self._status:
            return
        if self._status is _NOT_SERVING:
            logger.warning("serving again")
        self._status = status
        for name in _NAMES:
            await self._statuses.set(name, status)
