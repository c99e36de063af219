"""Permits by client: each has its own share, and nothing is remembered of who has nothing in hand."""

from contextlib import ExitStack

import pytest

from producer.clients import Clients
from producer.errors import OverloadedError
from producer.wire.contract import Reason


def test_a_client_has_its_share_and_no_more() -> None:
    clients = Clients(2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(clients.permit("a"))
        with pytest.raises(OverloadedError, match="the client has 2 items in hand already") as raised:
            stack.enter_context(clients.permit("a"))
        assert raised.value.reason is Reason.CLIENT_LIMIT
        assert raised.value.retry_s > 0
        stack.enter_context(clients.permit("b"))  # another's share is untouched


def test_a_permit_ends_with_its_item() -> None:
    clients = Clients(1)
    for _ in range(3):
        with clients.permit("a"):
            pass
    with pytest.raises(RuntimeError), clients.permit("a"):
        raise RuntimeError
    with clients.permit("a"):
        assert len(clients) == 1


def test_who_has_nothing_in_hand_is_forgotten() -> None:
    clients = Clients(1)
    for number in range(1000):
        with clients.permit(f"host {number}"):
            assert len(clients) == 1
    with clients.permit("a"):
        for _ in range(2):
            with pytest.raises(OverloadedError), clients.permit("a"):
                pass
    assert len(clients) == 0


def test_none_is_a_limit_of_nothing() -> None:
    clients = Clients(0)
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(clients.permit("a"))
