"""What the shim's tests share: a web server with files, which vLLM's own connector fetches from."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from vllm.connections import global_http_connection

from consumer_shim import budget
from consumer_shim.budget import RetryBudget


async def eventually(condition: Callable[[], object]) -> None:
    """Waits until `condition` holds."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came")


@pytest.fixture(autouse=True)
def _own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test sends again is no other's loss."""
    monkeypatch.setattr(budget, "PROCESS", RetryBudget())


class FileServer:
    """Answers every GET on loopback with what `files` has for its path, or else with `statuses`, or else 404."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.statuses: dict[str, int] = {}
        self.requests: list[str] = []
        """Paths in the order in which they were asked for."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator["FileServer"]:
        """Serves meanwhile."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        files = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                files.requests.append(self.path)
                body = files.files.get(self.path, b"")
                self.send_response(200 if self.path in files.files else files.statuses.get(self.path, 404))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """Nothing."""

        return Handler


@pytest.fixture
async def file_server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FileServer]:
    """For an asynchronous test; vLLM tries each fetch once, as its pauses between tries are of seconds.

    vLLM keeps one HTTP session for the process, which belongs to the loop that began it: here it ends with the test.
    """
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    with FileServer().running() as server:
        yield server
        session, global_http_connection._async_client = global_http_connection._async_client, None
        if session is not None:
            await session.close()
