"""What tests of the service share."""

from collections.abc import AsyncIterator

import pytest

from tests.integration.rig import Rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with Rig() as rig:
        yield rig
