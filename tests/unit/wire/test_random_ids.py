"""Ids: never the same twice, also in a fork, and rarely asked of the system."""

import os
import re

import pytest

from producer.wire.random_ids import random_id


def test_they_are_32_hex_digits_and_never_the_same() -> None:
    made = [random_id() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in made)


def test_the_system_is_asked_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = os.urandom

    def counted(num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return ask(num_bytes)

    monkeypatch.setattr("os.urandom", counted)
    made = {random_id() for _ in range(640)}
    assert len(made) == 640
    assert len(asked) <= 10
    assert sum(asked) <= 16 * 700


def test_a_fork_makes_others() -> None:
    random_id()
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        os.write(sender, "".join(random_id() for _ in range(50)).encode())
        os._exit(0)
    os.close(sender)
    os.waitpid(child, 0)
    with os.fdopen(receiver) as file:
        text = file.read()
    made = {text[start : start + 32] for start in range(0, len(text), 32)}
    assert len(made) == 50
    assert not made & {random_id() for _ in range(100)}
