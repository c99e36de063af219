"""All transports, each with a producer's process and a consumer that the tests of a module share."""

from collections.abc import Iterator

import pytest

from tests.integration.transports.kit import Consumer, ProducerProcess, eventually
from tests.kit.leftovers import leftovers, snapshot
from tests.kit.processes import MARK, MARK_VALUE


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No process, shared memory or port outlives a module; agents of this process carry the mark, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, MARK_VALUE)
        before = snapshot()
        yield
    assert eventually(lambda: not leftovers(before)), leftovers(before)


@pytest.fixture(scope="module", params=["grpc", "nixl", "mooncake"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def consumer(transport: str) -> Iterator[Consumer]:
    """For tests that leave it as it was: nothing reserved, its agent up."""
    with Consumer(transport) as consumer:
        yield consumer


@pytest.fixture(scope="module")
def producer(transport: str) -> Iterator[ProducerProcess]:
    """For tests that leave it alive."""
    with ProducerProcess(transport) as producer:
        yield producer


@pytest.fixture
def mortal(transport: str) -> Iterator[ProducerProcess]:
    """A producer that a test may end, with its agent."""
    with ProducerProcess(transport) as producer:
        yield producer
