"""What middleware and engine tell each other over a socket that any process of the host can send to."""

import json
import os
import socket
import threading
from typing import Any

from consumer_shim import side_channel
from consumer_shim.pull import Failure
from consumer_shim.side_channel import SideChannel, ask_reason, leave_tickets
from consumer_shim.tickets import PullTicket, to_params
from tests.fuzz.checks import expect
from tests.fuzz.mutate import json_text, with_kind

_TICKET = PullTicket(
    key="ab" * 32,
    modality="image",
    num_rows=4,
    width=8,
    dtype="bfloat16",
    epoch="00" * 8,
    lease_id="cd" * 16,
    address="127.0.0.1:50051",
)
_LEASE = "cd" * 16


class _Engine:
    """The engine's end, which is asked directly: what its thread lets pass is an outcome, the rest would end it."""

    def __init__(self) -> None:
        self.left: list[PullTicket] = []
        self.channel = SideChannel(f"fuzz-{os.getpid()}", self._failure, lambda tickets, _: self.left.extend(tickets))
        self.channel.close()

    def ask(self, question: bytes) -> None:
        self.left.clear()
        try:
            answer = self.channel._answer(question)
        except (ValueError, TypeError, RecursionError):
            return
        expect(len(answer) <= 1 << 16, "an answer does not fit a datagram")
        if self.left:
            again = json.loads(json.dumps(to_params(self.left)))
            expect(side_channel.from_params(again) == self.left, "tickets are not the same after a round trip")
        else:
            expect(json.loads(answer) in (True, None, [503, "gone"]), f"the answer is {answer!r}")

    @staticmethod
    def _failure(lease_id: str) -> Failure | None:
        expect(isinstance(lease_id, str), "a lease is no text")
        return Failure(503, "gone") if lease_id == _LEASE else None


class _Answerer:
    """Somebody who has the engine's name and answers whatever is in `answer`."""

    def __init__(self) -> None:
        self.engine_id = f"fuzz-answers-{os.getpid()}"
        self.answer = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(side_channel._address(self.engine_id))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            _, sender = self._socket.recvfrom(1 << 16)
            self._socket.sendto(self.answer, sender)


_engine: Any = None
_answerer: Any = None


def target(data: bytes) -> None:
    """A question to the engine, or an answer to either of the middleware's questions."""
    global _engine, _answerer
    _engine, _answerer = _engine or _Engine(), _answerer or _Answerer()
    if not data:
        return
    kind, content = data[0] % 3, data[1:]
    if kind == 0:
        _engine.ask(content)
        return
    _answerer.answer = content
    if kind == 1:
        _ask(_answerer.engine_id)
    else:
        expect(leave_tickets(_answerer.engine_id, [_TICKET]) in (True, False), "it has some of the tickets")


def _ask(engine_id: str) -> None:
    failure = ask_reason(engine_id, [_LEASE])
    if failure is not None:
        is_status = isinstance(failure.http_status, int) and 400 <= failure.http_status <= 599
        expect(is_status and isinstance(failure.message, str), f"a reason is {failure}")


_WORDS: tuple[Any, ...] = (
    *("key", "modality", "num_rows", "width", "dtype", "epoch", "lease_id", "address", "ec_producer_tickets"),
    *("ab" * 32, "cd" * 16, "00" * 8, "image", "float32", 1 << 24, 0, True, [503, "gone"], 503, [], {}, "AB" * 32),
)
mutate = with_kind(3, json_text(_WORDS))


def seeds() -> dict[str, bytes]:
    return {
        "reason": b"\0" + json.dumps([_LEASE]).encode(),
        "tickets": b"\0" + json.dumps(to_params([_TICKET])).encode(),
        "failure": b"\1" + json.dumps([503, "gone"]).encode(),
        "nothing": b"\1null",
        "has-all": b"\2true",
    }
