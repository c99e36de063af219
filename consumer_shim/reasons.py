"""Why a request failed, from the engine's process to the middleware's: vLLM itself passes on no reason.

An abstract Unix socket, named by the engine's id: it exists while the engine does and leaves no file.
"""

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable

from consumer_shim.pull import Failure

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 15
_TIMEOUT_S = 1.0


def _address(engine_id: str) -> bytes:
    return f"\0ec-producer-shim-{engine_id}".encode()[:107]


class ReasonServer:
    """Answers the middleware's questions; owns a thread."""

    def __init__(self, engine_id: str, failure_of: Callable[[str], Failure | None]) -> None:
        """`failure_of` gives the failure of the request that held a ticket's lease."""
        self._failure_of = failure_of
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(_address(engine_id))
        except OSError as error:  # a reason is a courtesy; the engine works without
            logger.warning("failed requests will have no reason: %s", error)
            return
        threading.Thread(target=self._serve, name="reasons", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes it
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                question, sender = self._socket.recvfrom(_MAX_BYTES)
                self._socket.sendto(self._answer(question), sender)
            except (ValueError, TypeError):
                continue  # not our middleware's question
            except OSError:
                continue  # the sender has gone, or this was closed

    def _answer(self, question: bytes) -> bytes:
        failures = (self._failure_of(str(lease_id)) for lease_id in json.loads(question))
        found = next((failure for failure in failures if failure is not None), None)
        return json.dumps(None if found is None else [found.http_status, found.message[:2000]]).encode()


def ask(engine_id: str, lease_ids: list[str]) -> Failure | None:
    """Why the request that held one of these leases failed; None where it is not known. Blocks for at most 1 s."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        asking.settimeout(_TIMEOUT_S)
        try:
            asking.bind("")  # a name of the kernel's choice, to be answered at
            asking.sendto(json.dumps(lease_ids[:256]).encode(), _address(engine_id))
            answer = json.loads(asking.recv(_MAX_BYTES))
        except (OSError, ValueError):
            return None
    return None if answer is None else Failure(*answer)
