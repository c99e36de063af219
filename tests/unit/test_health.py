"""Health follows what the probes say, and says it once."""

import pytest
from grpc_health.v1 import health, health_pb2

from producer.health import Health
from producer.metrics import Metrics
from producer.wire.contract import SERVICE_NAME
from tests.unit.conftest import sample

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Parts:
    """Two parts; what is wrong with each."""

    def __init__(self) -> None:
        self.troubles = {"device": "", "preprocessing": ""}
        self.statuses = health.aio.HealthServicer()
        probes = {name: lambda name=name: self.troubles[name] for name in self.troubles}
        self.metrics = Metrics()
        self.health = Health(self.statuses, probes, self.metrics)

    async def status(self) -> set[int]:
        requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", SERVICE_NAME)]
        return {(await self.statuses.Check(request, None)).status for request in requests}


async def test_one_part_that_fails_is_enough_until_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts()
    await parts.health.check()
    assert await parts.status() == {SERVING}
    parts.troubles["preprocessing"] = "no process can be started"
    for _ in range(3):
        await parts.health.check()
        assert await parts.status() == {NOT_SERVING}
    assert [record.getMessage() for record in caplog.records] == [
        "not serving: preprocessing: no process can be started"
    ]
    parts.troubles["preprocessing"] = ""
    await parts.health.check()
    assert await parts.status() == {SERVING}


async def test_what_the_probes_say_is_a_metric() -> None:
    parts = Parts()
    await parts.health.check()
    assert [sample(parts.metrics, "part_up", part=part) for part in parts.troubles] == [1, 1]
    parts.troubles["device"] = "lost"
    await parts.health.check()
    assert [sample(parts.metrics, "part_up", part=part) for part in parts.troubles] == [0, 1]


async def test_a_service_that_stops_is_not_serving() -> None:
    parts = Parts()
    await parts.health.check()
    await parts.health.stop()
    assert await parts.status() == {NOT_SERVING}
