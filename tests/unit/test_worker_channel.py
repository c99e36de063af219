"""Messages over real sockets: whole, whatever their size and however they come, and in few system calls."""

import functools
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from producer.worker_main import Channel, Message, send

MIB = 1 << 20


class Counting(socket.socket):
    """Counts the calls that move bytes."""

    num_sent = num_received = 0

    def sendmsg(self, *args: Any) -> int:
        self.num_sent += 1
        return super().sendmsg(*args)

    def recvmsg_into(self, *args: Any) -> Any:
        self.num_received += 1
        return super().recvmsg_into(*args)


@pytest.fixture
def ends() -> Iterator[tuple[Counting, Counting]]:
    near, far = (Counting(fileno=one.detach()) for one in socket.socketpair())
    with near, far:
        near.settimeout(None)
        far.settimeout(None)
        yield near, far


def sent(end: socket.socket, message: Message) -> threading.Thread:
    """A thread that sends it: what is large waits for its reader."""
    thread = threading.Thread(target=Channel(end).send, args=(message,))
    thread.start()
    return thread


@pytest.mark.parametrize(
    "sizes",
    [(), (0,), (1, 0, 4095, 4096, 4097), (3 * MIB,), (5, 150_000, 5), (1,) * 1500, (3000,) * 600],
    ids=lambda sizes: f"{len(sizes)} frames of {sum(sizes)} bytes",
)
def test_a_message_arrives_as_it_was_sent(ends: tuple[Counting, Counting], sizes: tuple[int, ...]) -> None:
    near, far = ends
    message = Message(fields={"a": [1, "b"]}, frames=[bytes([index % 251]) * size for index, size in enumerate(sizes)])
    channel = Channel(near)
    for _ in range(2):
        thread = sent(far, message)
        assert channel.receive(4 * MIB) == message
        assert not channel.has_more
        thread.join()


def test_a_small_message_takes_one_call_and_a_larger_one_two(ends: tuple[Counting, Counting]) -> None:
    near, far = ends
    for frames, num_received in (([b"x" * 300, b"y" * 24], 1), ([b"x" * 300, b"z" * 100_000, b"y" * 24], 2)):
        near.num_received = far.num_sent = 0
        Channel(far).send(Message(frames=frames))
        assert Channel(near).receive(MIB).frames == frames
        assert (far.num_sent, near.num_received) == (1, num_received)


def test_what_comes_after_a_message_is_noticed(ends: tuple[Counting, Counting]) -> None:
    near, far = ends
    channel = Channel(near)
    send(Message(fields={"first": True}), far.sendall)
    assert channel.receive(0).fields == {"first": True}
    assert not channel.has_more
    wire = bytearray()
    for _ in range(2):
        send(Message(), wire.extend)
    far.sendall(wire)
    channel.receive(0)
    assert channel.has_more


def test_one_that_trickles_is_given_up_when_its_reader_says_so(ends: tuple[Counting, Counting]) -> None:
    """Frame by frame, of which each comes at once."""
    near, far = ends
    wire = bytearray()
    send(Message(frames=[b"x"] * 100), wire.extend)
    checks: list[int] = []

    def check() -> None:
        checks.append(1)
        if len(checks) > 20:
            raise TimeoutError("it takes too long")

    head = len(wire) - 100
    far.sendall(wire[:head])
    ended = threading.Event()

    def trickle() -> None:
        for index in range(head, len(wire)):
            if ended.wait(0.01):
                return
            far.sendall(wire[index : index + 1])

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TimeoutError, match="it takes too long"):
        Channel(near, check=check).receive(MIB)
    ended.set()
    thread.join()


@pytest.mark.parametrize("do", ["send", "receive"])
def test_a_call_that_times_out_asks_whether_to_go_on(ends: tuple[Counting, Counting], do: str) -> None:
    near, _ = ends
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        near.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, 20_000))
    asked: list[int] = []

    def idle() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise InterruptedError("closed")

    channel = Channel(near, idle=idle)
    call = functools.partial(channel.send, Message(frames=[bytes(8 * MIB)]))
    with pytest.raises(InterruptedError, match="closed"):
        call() if do == "send" else channel.receive(MIB)


def test_the_other_ends_end_is_one(ends: tuple[Counting, Counting]) -> None:
    near, far = ends
    far.sendall(struct.pack("!I", 100) + b"{")
    far.close()
    with pytest.raises(EOFError):
        Channel(near).receive(MIB)
