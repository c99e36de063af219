"""A small HTTP server for a WSGI application, bounded in connections, in time and in what a request may have.

Threads answer, so that it works while the event loop is busy with loading a model. Every connection is one request.
"""

import http.client
import io
import logging
import socket
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Any, cast
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

logger = logging.getLogger(__name__)

_SWEEP_S = 0.25
_PLACE_S = 1.0
"""What a connection may take to end once its socket is shut."""
_MAX_HEAD_BYTES = 16 << 10
"""Of a request's line and headers."""
_MAX_REST = 64
"""Reads of what a client sends on although it was refused."""


class HttpServer:
    """Owns the port and the threads that answer. A slow client costs a place for `connection_s` at most, and gives it
    up sooner where another needs it."""

    def __init__(
        self, host: str, port: int, app: "WSGIApplication", *, max_connections: int = 16, connection_s: float = 10.0
    ) -> None:
        """Takes the port; port 0 takes a free one. `connection_s` is what a connection may last.

        Raises:
            OSError: the address cannot be had.
        """
        self._server = _Server(host, port, app, max_connections, connection_s)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_SWEEP_S,), name="http", daemon=True)

    @property
    def port(self) -> int:
        """The one that was taken."""
        return self._server.server_port

    def start(self) -> None:
        """From here on it answers."""
        self._thread.start()

    def close(self) -> None:
        """Ends it, and every connection."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(WSGIServer):
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(self, host: str, port: int, app: "WSGIApplication", max_connections: int, connection_s: float) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._max_connections = max_connections
        self._connection_s = connection_s
        self._since_s: dict[socket.socket, float] = {}  # the oldest first
        self._changed = threading.Condition()
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        """As the base class, without asking a name server for this host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """On the server's thread: gives the connection a thread, in the oldest one's place if there is no other."""
        with self._changed:
            if len(self._since_s) >= self._max_connections:
                _shut(next(iter(self._since_s)))
            if not self._changed.wait_for(lambda: len(self._since_s) < self._max_connections, _PLACE_S):
                self.shutdown_request(request)
                return
            self._since_s[request] = time.monotonic()
        thread = threading.Thread(target=self._answer, args=(request, client_address), name="http-answer", daemon=True)
        thread.start()

    def service_actions(self) -> None:
        """On the server's thread, several times a second: ends what has lasted too long."""
        oldest_s = time.monotonic() - self._connection_s
        with self._changed:
            for connection, since_s in self._since_s.items():
                if since_s <= oldest_s:
                    _shut(connection)

    def server_close(self) -> None:
        super().server_close()
        with self._changed:
            for connection in self._since_s:
                _shut(connection)
            self._changed.wait_for(lambda: not self._since_s, _PLACE_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no news; our own mistakes are the application's to log."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logger.error("an HTTP connection failed", exc_info=error)

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # whatever it is, it is this connection's
            self.handle_error(request, client_address)
        finally:
            with self._changed:  # before it is closed: its number may be another's then
                del self._since_s[request]
                self._changed.notify_all()
            self.shutdown_request(request)


class _Writer(ServerHandler):
    server_software = "ec-producer"  # no versions for strangers


class _Handler(WSGIRequestHandler):
    """Reads one request and has the application answer it."""

    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"
    command = requestline = ""
    request_version = "HTTP/1.0"

    def handle(self) -> None:
        """One request, whose body, if it has one, is not read."""
        head = _Head(self.rfile, _MAX_HEAD_BYTES)
        self.rfile = head  # type: ignore[assignment]  # nothing else of it is used
        try:
            self.raw_requestline = head.readline(_MAX_HEAD_BYTES + 1)
            if not self.parse_request():
                self._refuse()
                return
        except http.client.LineTooLong:
            self.send_error(414)
            self._refuse()
            return
        out = cast("IO[bytes]", self.wfile)
        handler = _Writer(io.BytesIO(), out, sys.stderr, self.get_environ(), multithread=True)
        handler.request_handler = self  # type: ignore[attr-defined]  # it logs there
        app = self.server.get_app()  # type: ignore[attr-defined]
        handler.run(app)

    def _refuse(self) -> None:
        """Lets the client read what it was told: closing while it still sends would take that from it."""
        self.connection.shutdown(socket.SHUT_WR)
        for _ in range(_MAX_REST):
            if not self.connection.recv(_MAX_HEAD_BYTES):
                return

    def version_string(self) -> str:
        """Of answers that the application does not give."""
        return _Writer.server_software

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes and probes are no news."""


class _Head:
    """What a client sends, up to a bound on all of it."""

    def __init__(self, file: Any, max_bytes: int) -> None:
        self._file = file
        self._left = max_bytes

    def readline(self, size: int) -> bytes:
        """A line. LineTooLong, which becomes status 414 or 431: the request is too long with it."""
        line: bytes = self._file.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("header")
        return line

    def close(self) -> None:
        self._file.close()


def _shut(connection: socket.socket) -> None:
    """Wakes the thread that reads or writes it, which then ends it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the client has gone already
        return
