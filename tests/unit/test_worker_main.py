"""Messages between a pool and its processes: what is one arrives, what is none is refused within bounds."""

import contextlib
import io
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer import worker_main
from producer.wire.origin import NOBODY, Origin, current
from producer.worker_main import MAX_FRAMES, MAX_HEAD_BYTES, Message, MessageError, receive, send

HEAD = {"fields": {}, "frames": [], "error": "", "last": False}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def reader(wire: bytes) -> Callable[[bytearray], None]:
    file = io.BytesIO(wire)

    def fill(buffer: bytearray) -> None:
        if file.readinto(buffer) != len(buffer):
            raise EOFError

    return fill


def packed(head: Any, frames: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("!I", len(text)) + text + frames


@given(st.dictionaries(st.text(), JSON), st.lists(st.binary(max_size=64), max_size=4), st.text(), st.booleans())
def test_a_message_arrives_as_it_was_sent(fields: dict[str, Any], frames: list[bytes], error: str, last: bool) -> None:
    wire = bytearray()
    send(Message(fields=fields, frames=frames, error=error, last=last), wire.extend)
    assert receive(reader(wire), 256) == Message(fields=fields, frames=frames, error=error, last=last)


def test_whom_a_task_is_for_arrives_or_is_nobody() -> None:
    origin = Origin("id-1", f"00-{'a' * 32}-{'b' * 16}-01")
    wire = bytearray()
    send(Message(origin=origin), wire.extend)
    assert receive(reader(wire), 0).origin == origin
    for said in (None, 5, [], {"x-request-id": "not sane\n"}):
        assert receive(reader(packed(HEAD | {"origin": said})), 0).origin == NOBODY


def test_an_unforeseen_error_is_said_with_the_id_and_without_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(
        worker_main.logger, "error", lambda text, *args: said.append((current().request_id, text % args))
    )

    def work(request: Message) -> Message:
        assert current() == request.origin
        raise RuntimeError("SECRET")

    assert worker_main._do(work, Message(origin=Origin("id-1"))).error == "RuntimeError"
    ((request_id, text),) = said
    assert request_id == "id-1"
    assert text.startswith("a task failed: RuntimeError at test_worker_main.py:")
    assert "SECRET" not in text


def test_arrays_of_any_shape_are_sent_as_their_bytes() -> None:
    arrays = [np.arange(6, dtype="<f4").reshape(2, 3), np.zeros((0, 3)), np.array(7, "<i8")]
    wire = bytearray()
    send(Message(frames=arrays), wire.extend)
    assert receive(reader(wire), 1 << 10).frames == [array.tobytes() for array in arrays]


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xff",
        b"{",
        b"[" * 100_000,
        [],
        {},
        HEAD | {"fields": []},
        HEAD | {"frames": {}},
        HEAD | {"frames": [1.0]},
        HEAD | {"frames": [True]},
        HEAD | {"frames": [-1, 1]},
        HEAD | {"frames": [0] * (MAX_FRAMES + 1)},
        HEAD | {"error": None},
        HEAD | {"last": 0},
    ],
    ids=lambda head: str(head)[:40],
)
def test_what_is_no_message_is_refused(head: Any) -> None:
    receive(reader(packed(HEAD)), 0)
    with pytest.raises(MessageError):
        receive(reader(packed(head, bytes(8))), 1 << 10)


def test_sizes_are_checked_before_room_is_made() -> None:
    frames = HEAD | {"frames": [1 << 50]}
    with pytest.raises(MessageError, match="at most 10 are allowed"):
        receive(reader(packed(frames)), 10)
    with pytest.raises(MessageError, match=f"at most {MAX_HEAD_BYTES} are allowed"):
        receive(reader(struct.pack("!I", MAX_HEAD_BYTES + 1)), 10)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_are_refused(wire: bytes) -> None:
    with contextlib.suppress(MessageError, EOFError):
        receive(reader(wire), 100)
    with contextlib.suppress(MessageError, EOFError):
        receive(reader(packed(wire)), 100)
