"""The metrics port's server: what it answers, and what slow, silent and greedy clients cannot do to it."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from producer.http_server import HttpServer

MAX_CONNECTIONS = 3
CONNECTION_S = 1.0
WAIT_S = 30.0
LARGE = b"x" * (32 << 20)
"""More than the kernel takes for a client that does not read."""


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    if environ["PATH_INFO"] == "/broken":
        raise RuntimeError("a mistake of ours")
    body = LARGE if environ["PATH_INFO"] == "/large" else environ["PATH_INFO"].encode()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with serving(connection_s=WAIT_S) as server:
        yield server


@contextlib.contextmanager
def serving(*, connection_s: float = CONNECTION_S, host: str = "127.0.0.1") -> Iterator[HttpServer]:
    server = HttpServer(host, 0, app, max_connections=MAX_CONNECTIONS, connection_s=connection_s)
    server.start()
    try:
        yield server
    finally:
        server.close()
        wait_until(lambda: not answering())


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def answering() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "http-answer"]


def ask(server: HttpServer, path: str = "/path", method: str = "GET", host: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, server.port, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def connect(server: HttpServer, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    client.sendall(sent)
    return client


def everything(client: socket.socket) -> bytes:
    """What comes until the other end closes, however it does."""
    received = b""
    with client, contextlib.suppress(ConnectionError):
        while part := client.recv(1 << 16):
            received += part
    return received


def test_it_answers(server: HttpServer) -> None:
    assert ask(server) == (200, b"/path")
    assert ask(server, method="HEAD") == (200, b"")


def test_it_answers_on_ipv6() -> None:
    with serving(host="::1") as server:
        assert ask(server, host="::1") == (200, b"/path")


def test_it_says_nothing_of_versions(server: HttpServer) -> None:
    for request in (b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200):
        answer = everything(connect(server, request))
        assert b"\r\nServer: ec-producer\r\n" in answer
        assert b"Python" not in answer


def test_a_mistake_of_the_application_is_a_500(server: HttpServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(server, "/broken")[0] == 500
    assert ask(server) == (200, b"/path")
    assert "a mistake of ours" in capsys.readouterr().err


def test_silent_clients_give_up_their_places_to_others(server: HttpServer) -> None:
    """They could stay for much longer than the test."""
    begun_s = time.monotonic()
    silent = [connect(server) for _ in range(MAX_CONNECTIONS)]
    assert ask(server) == (200, b"/path")
    assert everything(silent[0]) == b""
    assert time.monotonic() - begun_s < WAIT_S / 2
    for client in silent:
        client.close()


def test_clients_that_do_not_read_give_up_their_places_to_others(server: HttpServer) -> None:
    slow = [connect(server, b"GET /large HTTP/1.0\r\n\r\n") for _ in range(MAX_CONNECTIONS)]
    assert ask(server) == (200, b"/path")
    assert len(everything(slow[0])) < len(LARGE)
    for client in slow:
        client.close()


def test_any_number_of_clients_has_few_threads(server: HttpServer) -> None:
    silent = []
    for _ in range(10 * MAX_CONNECTIONS):
        silent.append(connect(server))
        assert len(answering()) <= 2 * MAX_CONNECTIONS  # some may be at their very end
    assert ask(server) == (200, b"/path")
    wait_until(lambda: len(answering()) < MAX_CONNECTIONS)
    for client in silent:
        client.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.0\r\nA: b\r\n", b"GET /large HTTP/1.0\r\n\r\n"])
def test_a_connection_ends_in_time_though_nobody_needs_its_place(sent: bytes) -> None:
    with serving() as server:
        client = connect(server, sent)
        wait_until(answering)
        wait_until(lambda: not answering())
        client.close()


def test_dripping_does_not_prolong_a_connection() -> None:
    with serving() as server, connect(server, b"GET / HTTP/1.0\r\n") as client:
        wait_until(answering)

        def drip() -> bool:
            with contextlib.suppress(OSError):
                client.sendall(b"A: b\r\n")
            return not answering()

        wait_until(drip)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.0\r\n\r\n", 414),
        (b"GET / HTTP/1.0\r\nA: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
    ],
)
def test_a_request_that_is_too_long_or_none_is_refused(server: HttpServer, request_: bytes, status: int) -> None:
    with connect(server, request_) as client:
        client.shutdown(socket.SHUT_WR)
        assert f"{status} ".encode() in everything(client)
    assert ask(server) == (200, b"/path")


def test_a_taken_port_is_said(server: HttpServer) -> None:
    with pytest.raises(OSError, match="in use"):
        HttpServer("127.0.0.1", server.port, app)


def test_closing_ends_what_is_under_way() -> None:
    with serving(connection_s=WAIT_S) as server:
        client = connect(server)
        assert ask(server) == (200, b"/path")
        port = server.port
    assert everything(client) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
