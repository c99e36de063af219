"""What grpc.health.v1 says: SERVING while every part that an encode needs is seen to work. For the event loop."""

import logging
from collections.abc import Callable, Mapping

from grpc_health.v1 import health, health_pb2

from producer.wire.contract import SERVICE_NAME

logger = logging.getLogger(__name__)

_NAMES = ("", SERVICE_NAME)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Owns the status. A probe returns "" where its part works, else a sentence for the log."""

    def __init__(self, statuses: health.aio.HealthServicer, probes: Mapping[str, Callable[[], str]]) -> None:
        self._statuses = statuses
        self._probes = probes
        self._status: int | None = None

    async def check(self) -> None:
        """Asks all probes and says what they say; to be called every second."""
        troubles = {name: why for name, probe in self._probes.items() if (why := probe())}
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
