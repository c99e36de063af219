"""What the far end of a transport says: an agent's messages, where shared memory is, the bytes of a block in parts."""

import os
import socket
import struct
import threading
from random import Random
from typing import Any

from producer.memory.region import SharedRegion
from producer.transport import agent as agents
from producer.transport import shm
from producer.transport.agent import AgentProcess
from producer.transport.base import BlockDescriptor, TransportError, TransportUnavailableError
from producer.transport.shm import ShmOutlet, ShmReader
from producer.transport.stream import StreamReader
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.fuzz.checks import check_said, expect
from tests.fuzz.mutate import AnyBytes, json_text, with_kind

_REGION_BYTES = 8192
_AT, _BLOCK_BYTES = 1024, 256
_GUARD = 0xA5


class _Child:
    """The process of an agent that says one thing and ends."""

    pid = 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        return


class _Agent(AgentProcess):
    """The owner's side without a process: the socket's other end is ours."""

    def __init__(self) -> None:
        self._arguments = ("backend", "reader", "{}")
        self._region = _regions()[0]
        self._lock = threading.Lock()
        self._reads = {}
        self._closed = False
        self._heard_s = 0.0
        self.identity = None


def _hello(data: bytes) -> None:
    """The first message of an agent."""

    def popen(command: Any, *, pass_fds: tuple[int, int], **options: Any) -> _Child:
        os.write(pass_fds[1], data) if data else None
        return _Child()

    agent = _Agent()
    before, agents.subprocess.Popen = agents.subprocess.Popen, popen  # type: ignore[misc, assignment]
    try:
        agent._start()
    except (TransportError, TransportUnavailableError) as error:
        check_said(str(error) or "nothing", data, 2000)  # an agent need not say why
        return
    finally:
        agents.subprocess.Popen = before  # type: ignore[misc]
        agent._socket.close()
    identity = agent.identity
    expect(identity is not None, "an agent is up without an identity")
    for value, kind in ((identity.name, str), (identity.metadata, bytes), (identity.address, int)):
        expect(isinstance(value, kind), f"an agent's {kind.__name__} is {value!r}")


def _answers(data: bytes) -> None:
    """An agent's messages, a line each; reads 1 and 2 are in flight."""
    agent = _Agent()
    agent._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reads = {number: agents._Read(number) for number in (1, 2)}
    agent._reads = dict(reads)
    with agent._socket:
        with theirs:
            for line in data.split(b"\n")[:16]:
                theirs.send(line)
        agent._take_answers()
    for number, read in reads.items():
        expect(read.ended.is_set() != (number in agent._reads), "a read has ended and is in flight")
        expect(isinstance(read.error, str), f"a read's error is {read.error!r}")


def _place(data: bytes) -> None:
    """Where a producer says that its memory is; SELF stands for this host and user, FD for a region of ours."""
    place = data.decode(errors="replace")
    _, theirs = _regions()
    inode = os.fstat(theirs.fd).st_ino
    for word, value in (("SELF", shm._neighbours()), ("PID", os.getpid()), ("FD", theirs.fd), ("INODE", inode)):
        place = place.replace(word, str(value))
    reader = ShmReader(_regions()[0])
    reaches = reader.reaches(place)
    try:
        reader.read(_block(place), _AT, 1.0)
    except TransportError as error:
        check_said(str(error), data, 600)  # it repeats 100 characters, of which some take six
    else:
        expect(reaches, "what cannot be reached is read")
        expect(
            _regions()[0].view[_AT : _AT + _BLOCK_BYTES] == bytes(theirs.view[:_BLOCK_BYTES]), "other bytes are read"
        )
    reader.close()


def _parts(data: bytes) -> None:
    """A block as gRPC streams it: lengths, each followed by so many bytes."""
    region = _regions()[0]
    region.view[:] = bytes([_GUARD]) * _REGION_BYTES
    parts = _Parts(data)
    try:
        StreamReader(region, lambda request, timeout: parts).read(_block(""), _AT, 1.0)
    except TransportError as error:
        check_said(str(error), data)
    else:
        expect(bytes(region.view[_AT : _AT + _BLOCK_BYTES]) == parts.sent, "other bytes are read")
    around = bytes(region.view[:_AT]) + bytes(region.view[_AT + _BLOCK_BYTES :])
    expect(around == bytes([_GUARD]) * len(around), "it wrote outside of the block's place")
    expect(parts.is_cancelled, "the call is left open")


class _Parts:
    """The answers of one Fetch."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.sent = b""
        self.is_cancelled = False

    def __iter__(self) -> Any:
        left = self._data
        while len(left) > 2:
            (length,) = struct.unpack_from("<H", left)
            part, left = left[2 : 2 + length], left[2 + length :]
            self.sent += part
            yield pb.FetchResponse(data=part)

    def cancel(self) -> None:
        self.is_cancelled = True


def _block(peer: str) -> BlockDescriptor:
    return BlockDescriptor(
        transport="", lease_id="", address=0, num_bytes=_BLOCK_BYTES, generation=1, peer=peer, peer_metadata=b""
    )


_REGIONS: list[SharedRegion] = []


def _regions() -> list[SharedRegion]:
    """Ours, where embeddings land, and a producer's."""
    if not _REGIONS:
        _REGIONS.extend(SharedRegion.create(f"fuzz-{number}", _REGION_BYTES) for number in range(2))
        _REGIONS[1].view[:] = bytes(range(256)) * (_REGION_BYTES // 256)
    return _REGIONS


_KINDS = (_hello, _answers, _place, _parts)


def target(data: bytes) -> None:
    """The first byte says what the rest is."""
    if data:
        _KINDS[data[0] % len(_KINDS)](data[1:])


_WORDS: tuple[Any, ...] = (
    *("name", "metadata", "address", "error", "unavailable", "id", 1, 2, "AAAA", "", "A", {"id": 1, "error": ""}),
    *({"error": "no"}, {}, {"id": [1], "error": ""}, 4096),
)
_one_json = json_text(_WORDS)


def _lines(data: bytes, most: int, dice: Random, any_bytes: AnyBytes) -> bytes:
    lines = data.split(b"\n")
    at = dice.randrange(len(lines))
    lines[at] = _one_json(lines[at], max(1, most - len(data)), dice, any_bytes)
    if dice.random() < 0.2:
        lines.insert(at, dice.choice(lines))
    return b"\n".join(lines)[:most]


def _words(data: bytes, most: int, dice: Random, any_bytes: AnyBytes) -> bytes:
    """Now and then another number where a place has one."""
    words = data.split(b" ")
    if dice.random() < 0.5:
        words[dice.randrange(len(words))] = dice.choice(
            (b"SELF", b"PID", b"FD", b"INODE", b"0", b"1", b"-1", b"9" * 30)
        )
        return b" ".join(words)[:most]
    return any_bytes(data, most)


def _bytes(data: bytes, most: int, dice: Random, any_bytes: AnyBytes) -> bytes:
    return any_bytes(data, most)


mutate = with_kind(4, (_one_json, _lines, _words, _bytes))


def seeds() -> dict[str, bytes]:
    parts = struct.pack("<H", 156) + bytes(156) + struct.pack("<H", 100) + bytes(100)
    assert str(ShmOutlet(_regions()[1]).place).count(" ") == 3
    return {
        "hello": b'\0{"name": "agent", "metadata": "AAAA", "address": 4096}',
        "refusal": b'\0{"error": "no library", "unavailable": true}',
        "answers": b'\1{}\n{"id": 1, "error": ""}\n{"id": 2, "error": "it failed"}',
        "place": b"\2SELF PID FD INODE",
        "parts": b"\3" + parts,
    }
