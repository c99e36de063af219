"""Reasons for failed requests and tickets for others, across processes."""

import socket
import threading
import uuid
from collections.abc import Iterator

import pytest

from consumer_shim.pull import Failure
from consumer_shim.side_channel import SideChannel, ask_reason, leave_tickets
from consumer_shim.tickets import PullTicket
from producer.wire.origin import Origin

BOUND_S = 10.0
GONE = Failure(503, "the embedding has gone: größer als ein Zeichen")


@pytest.fixture
def engine_id() -> str:
    return f"engine-{uuid.uuid4()}"


@pytest.fixture
def server(engine_id: str) -> Iterator[SideChannel]:
    server = SideChannel(engine_id, {"lost": GONE, "late": Failure(504, "x" * 5000)}.get, print)
    yield server
    server.close()


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("leases", [["lost"], ["fine", "lost"], ["lost", "late"]])
def test_the_first_known_lease_gives_the_reason(engine_id: str, leases: list[str]) -> None:
    assert ask_reason(engine_id, leases) == GONE


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("leases", [[], ["fine"], ["fine"] * 100])
def test_unknown_leases_have_none(engine_id: str, leases: list[str]) -> None:
    assert ask_reason(engine_id, leases) is None


@pytest.mark.usefixtures("server")
def test_a_long_reason_is_cut(engine_id: str) -> None:
    assert ask_reason(engine_id, ["late"]) == Failure(504, "x" * 2000)


@pytest.mark.usefixtures("server")
def test_as_many_leases_as_a_request_may_have(engine_id: str) -> None:
    assert ask_reason(engine_id, ["lost"] + ["f" * 32] * 4095) == GONE


def test_without_a_server_there_is_none(engine_id: str) -> None:
    assert ask_reason(engine_id, ["lost"]) is None


def test_a_server_that_does_not_answer(engine_id: str) -> None:
    """`ask` ends before its answer comes."""
    asked_enough = threading.Event()

    def late(lease_id: str) -> Failure:
        asked_enough.wait(BOUND_S)
        return GONE

    server = SideChannel(engine_id, late, print)
    assert ask_reason(engine_id, ["lost"]) is None
    asked_enough.set()
    server.close()


def test_engines_do_not_hear_each_other(engine_id: str, server: SideChannel) -> None:
    other = SideChannel(engine_id + "-other", {}.get, print)
    assert ask_reason(engine_id + "-other", ["lost"]) is None
    assert ask_reason(engine_id, ["lost"]) == GONE
    other.close()


@pytest.mark.usefixtures("server")
def test_a_second_server_of_one_engine_is_harmless(engine_id: str, caplog: pytest.LogCaptureFixture) -> None:
    second = SideChannel(engine_id, {}.get, print)
    assert "failed requests will have no reason" in caplog.text
    second.close()
    assert ask_reason(engine_id, ["lost"]) == GONE


def send(engine_id: str, question: bytes, name: str | None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        if name is not None:
            sender.bind(name)
        sender.sendto(question, f"\0ec-producer-shim-{engine_id}".encode())


UNREADABLE = [b"", b"x", b"\xff", b"[", b'["lost"']


def answers_after(engine_id: str, question: bytes, name: str | None) -> bool:
    send(engine_id, question, name)
    return ask_reason(engine_id, ["lost"]) == GONE


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("question", UNREADABLE)
def test_it_survives_what_is_no_question(engine_id: str, question: bytes) -> None:
    assert answers_after(engine_id, question, "")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("question", [b"5", b"null", b"true"])
def test_it_survives_what_is_no_list(engine_id: str, question: bytes) -> None:
    assert answers_after(engine_id, question, "")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("question", [b"[[]]", b"[{}]", b"[null]"])
def test_it_survives_other_lists(engine_id: str, question: bytes) -> None:
    assert answers_after(engine_id, question, "")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    "question", [b"{}", b'{"a": 1}', b'{"ec_producer_tickets": 5}', b'{"ec_producer_tickets": [{"key": "x"}]}']
)
def test_it_survives_what_are_no_tickets(engine_id: str, question: bytes) -> None:
    assert answers_after(engine_id, question, "")


@pytest.mark.usefixtures("server")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_survives_deep_nesting(engine_id: str) -> None:
    """Any process of the host can send it, as abstract sockets have no owner."""
    assert answers_after(engine_id, b"[" * 50_000, "")


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
    SideChannel(engine_id, {}.get, print).close()
    for thread in set(threading.enumerate()) - before:
        thread.join(2.0)
        assert not thread.is_alive()
    SideChannel(engine_id, {}.get, print).close()
    assert caplog.text == ""


# Tickets


def tickets(count: int) -> list[PullTicket]:
    fields = {"modality": "image", "num_rows": 4, "width": 8, "dtype": "float32", "address": "producer:50051"}
    return [
        PullTicket(key=f"{number:064x}", epoch="0" * 16, lease_id=f"{number:032x}", **fields)  # type: ignore[arg-type]
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_tickets_arrive(engine_id: str, count: int) -> None:
    left: list[PullTicket] = []
    origins: set[Origin] = set()
    channel = SideChannel(engine_id, {}.get, lambda tickets, origin: (left.extend(tickets), origins.add(origin))[0])
    origin = Origin("id", f"00-{1:032x}-{2:016x}-01", "vendor=1")
    assert leave_tickets(engine_id, tickets(count), origin)
    assert left == tickets(count)
    assert origins == {origin}
    assert ask_reason(engine_id, ["lost"]) is None  # it answers on
    channel.close()


def test_tickets_that_do_not_arrive(engine_id: str) -> None:
    assert not leave_tickets(engine_id, tickets(1))  # nobody is there
