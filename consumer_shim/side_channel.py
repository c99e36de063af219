"""What the middleware and the engine's process tell each other beside vLLM, which passes on neither.

Why a request failed, and the tickets of one that will not bring them: vLLM makes requests of its own for beam search.
An abstract Unix socket, named by the engine's id, exists while the engine does and leaves no file.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from consumer_shim.logs import ShimLogger
from consumer_shim.pull import Failure
from consumer_shim.tickets import PullTicket, from_params, to_params
from producer.wire.origin import NOBODY, ORIGIN_PARAM, Origin

logger = ShimLogger(__name__)

_MAX_BYTES = 1 << 16
_MAX_TICKETS = 64  # in one message
_TIMEOUT_S = 1.0


def _address(engine_id: str) -> bytes:
    return f"\0ec-producer-shim-{engine_id}".encode()[:107]


class SideChannel:
    """The engine's end: answers the middleware; owns a thread."""

    def __init__(
        self,
        engine_id: str,
        failure_of: Callable[[str], Failure | None],
        leave: Callable[[Sequence[PullTicket], Origin], None],
    ) -> None:
        """`failure_of` gives the failure of the request that held a ticket's lease, `leave` keeps tickets and whom
        they are for."""
        self._failure_of = failure_of
        self._leave = leave
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(_address(engine_id))
        except OSError as error:  # the engine works without
            logger.warning("failed requests will have no reason, beam search no media: %s", error)
            return
        threading.Thread(target=self._serve, name="side-channel", daemon=True).start()

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
            except (ValueError, TypeError, RecursionError):
                continue  # not our middleware's question
            except OSError:
                continue  # the sender has gone, or this was closed

    def _answer(self, message: bytes) -> bytes:
        content = json.loads(message)
        if isinstance(content, dict):
            self._leave(from_params(content), Origin.from_params(content.get(ORIGIN_PARAM)))
            return b"true"
        failures = (self._failure_of(str(lease_id)) for lease_id in content)
        found = next((failure for failure in failures if failure is not None), None)
        return json.dumps(None if found is None else [found.http_status, found.message[:2000]]).encode()


def ask_reason(engine_id: str, lease_ids: list[str]) -> Failure | None:
    """Why the request that held one of these leases failed; None where it is not known. Blocks for at most 1 s."""
    match _exchange(engine_id, lease_ids[:256]):
        case [int(status), str(message)] if 400 <= status <= 599:
            return Failure(status, message)
    return None


def leave_tickets(engine_id: str, tickets: Sequence[PullTicket], origin: Origin = NOBODY) -> bool:
    """Gives the engine tickets for requests that will not bring them; whether it has all. Waits 1 s a message."""
    for_whom = {ORIGIN_PARAM: origin.to_params()}
    parts = (list(tickets[at : at + _MAX_TICKETS]) for at in range(0, len(tickets), _MAX_TICKETS))
    return all(_exchange(engine_id, {**to_params(part), **for_whom}) is True for part in parts)


def _exchange(engine_id: str, message: Any) -> Any:
    """The answer to a message; None where there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        asking.settimeout(_TIMEOUT_S)
        try:
            asking.bind("")  # a name of the kernel's choice, to be answered at
            asking.sendto(json.dumps(message).encode(), _address(engine_id))
            return json.loads(asking.recv(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
