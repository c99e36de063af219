"""What a producer is made of, as far as that needs no model."""

import pytest

from producer.app import _create_region


def test_a_pool_larger_than_the_host_is_refused() -> None:
    with pytest.raises(OSError, match=r"pool_bytes is 70368744177664; this host has \d+ bytes of memory"):
        _create_region(1 << 46)
