"""Reasons for failed requests, asked for across processes."""

import socket
import threading
import uuid
from collections.abc import Iterator

import pytest

from consumer_shim.pull import Failure
from consumer_shim.reasons import ReasonServer, ask

BOUND_S = 10.0
GONE = Failure(503, "the embedding has gone: größer als ein Zeichen")


@pytest.fixture
def engine_id() -> str:
    return f"engine-{uuid.uuid4()}"


@pytest.fixture
def server(engine_id: str) -> Iterator[ReasonServer]:
    server = ReasonServer(engine_id, {"lost": GONE, "late": Failure(504, "x" * 5000)}.get)
    yield server
    server.close()


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("leases", [["lost"], ["fine", "lost"], ["lost", "late"]])
def test_the_first_known_lease_gives_the_reason(engine_id: str, leases: list[str]) -> None:
    assert ask(engine_id, leases) == GONE


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("leases", [[], ["fine"], ["fine"] * 100])
def test_unknown_leases_have_none(engine_id: str, leases: list[str]) -> None:
    assert ask(engine_id, leases) is None


@pytest.mark.usefixtures("server")
def test_a_long_reason_is_cut(engine_id: str) -> None:
    assert ask(engine_id, ["late"]) == Failure(504, "x" * 2000)


@pytest.mark.usefixtures("server")
def test_as_many_leases_as_a_request_may_have(engine_id: str) -> None:
    assert ask(engine_id, ["lost"] + ["f" * 32] * 4095) == GONE


def test_without_a_server_there_is_none(engine_id: str) -> None:
    assert ask(engine_id, ["lost"]) is None


def test_a_server_that_does_not_answer(engine_id: str) -> None:
    """`ask` ends before its answer comes."""
    asked_enough = threading.Event()

    def late(lease_id: str) -> Failure:
        asked_enough.wait(BOUND_S)
        return GONE

    server = ReasonServer(engine_id, late)
    assert ask(engine_id, ["lost"]) is None
    asked_enough.set()
    server.close()


def test_engines_do_not_hear_each_other(engine_id: str, server: ReasonServer) -> None:
    other = ReasonServer(engine_id + "-other", {}.get)
    assert ask(engine_id + "-other", ["lost"]) is None
    assert ask(engine_id, ["lost"]) == GONE
    other.close()


@pytest.mark.usefixtures("server")
def test_a_second_server_of_one_engine_is_harmless(engine_id: str, caplog: pytest.LogCaptureFixture) -> None:
    second = ReasonServer(engine_id, {}.get)
    assert "failed requests will have no reason: " in caplog.text
    second.close()
    assert ask(engine_id, ["lost"]) == GONE


def send(engine_id: str, question: bytes, name: str | None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        if name is not None:
            sender.bind(name)
        sender.sendto(question, f"\0ec-producer-shim-{engine_id}".encode())


UNREADABLE = [b"", b"x", b"\xff", b"[", b'["lost"']


def answers_after(engine_id: str, question: bytes, name: str | None) -> bool:
    send(engine_id, question, name)
    return ask(engine_id, ["lost"]) == GONE


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("question", UNREADABLE)
def test_it_survives_what_is_no_question(engine_id: str, question: bytes) -> None:
    assert answers_after(engine_id, question, "")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("question", [b"5", b"null", b"true"])
def test_it_survives_what_is_no_list(engine_id: str, question: bytes) -> None:
    assert answers_after(engine_id, question, "")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("question", [b"{}", b"[[]]", b"[{}]", b"[null]"])
def test_it_survives_other_lists(engine_id: str, question: bytes) -> None:
    assert answers_after(engine_id, question, "")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    "question",
    [
        b'["lost"]',
        b"",
    ],
)
def test_it_survives_a_sender_without_a_name(engine_id: str, question: bytes) -> None:
    assert answers_after(engine_id, question, None)


def test_closing_ends_its_thread_and_frees_its_name(engine_id: str, caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    ReasonServer(engine_id, {}.get).close()
    for thread in set(threading.enumerate()) - before:
        thread.join(2.0)
        assert not thread.is_alive()
    ReasonServer(engine_id, {}.get).close()
    assert caplog.text == ""
