"""The service's event loop: the fast one if it is there, and one in any case."""

import asyncio
import sys

import pytest

from producer import event_loop


async def kind_of_loop() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_it_is_uvloop() -> None:
    assert event_loop.run(kind_of_loop()) == "uvloop"


def test_without_uvloop_it_is_that_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert event_loop.run(kind_of_loop()).startswith("asyncio.")


def test_an_error_comes_out() -> None:
    async def fail() -> None:
        raise OSError("taken")

    with pytest.raises(OSError, match="taken"):
        event_loop.run(fail())
