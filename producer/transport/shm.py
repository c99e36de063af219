"""Shared memory on one host: the reader maps the producer's region and copies the block once. No library, no agent.

It needs the same host, PID namespace and user on both ends. The region has no name; /proc leads to it while its owner
lives. A mapping of a region whose owner has gone is dropped at the next one, so that its memory is given back.
"""

import mmap
import os
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from producer.memory.region import SharedRegion
from producer.transport.base import BlockDescriptor, Endpoint, Outlet, Reader, TransportError
from producer.wire.contract import SHM_TRANSPORT


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a region is: whose processes can reach it, and by which descriptor of which process."""

    neighbours: str
    pid: int
    fd: int
    inode: int

    @classmethod
    def parse(cls, text: str) -> "_Place":
        neighbours, pid, fd, inode = text.split(" ")
        return cls(neighbours, int(pid), int(fd), int(inode))

    def __str__(self) -> str:
        return f"{self.neighbours} {self.pid} {self.fd} {self.inode}"

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self.pid}/fd/{self.fd}")

    def is_there(self) -> bool:
        """Whether the region can be opened from here; another file may have its descriptor by now."""
        try:
            return self.neighbours == _neighbours() and self.path.stat().st_ino == self.inode
        except OSError:
            return False


@cache
def _neighbours() -> str:
    """Equal for processes of one boot, PID namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}/{os.geteuid()}"


class ShmOutlet(Outlet):
    """The producer's end: it says where the region is, and no more."""

    name = SHM_TRANSPORT

    def __init__(self, region: SharedRegion) -> None:
        self.place = str(_Place(_neighbours(), os.getpid(), region.fd, os.fstat(region.fd).st_ino))

    def describe(self) -> Endpoint:
        return Endpoint(base=0, peer=self.place, metadata=b"")

    @property
    def is_up(self) -> bool:
        return True

    def close(self) -> None:
        return


class ShmReader(Reader):
    """A consumer's end. What it reads is there when `read` returns, and nothing comes later."""

    name = SHM_TRANSPORT

    def __init__(self, region: SharedRegion) -> None:
        self._region = region
        self._lock = threading.Lock()
        self._maps: dict[_Place, mmap.mmap] = {}

    def reaches(self, place: str) -> bool:
        """Whether the region at `place` can be mapped from here."""
        try:
            self._map(place)
        except TransportError:
            return False
        return True

    def read(self, block: BlockDescriptor, offset: int, timeout_s: float) -> None:
        source = memoryview(self._map(block.peer))
        with source, source[block.address : block.address + block.num_bytes] as rows:
            if rows.nbytes != block.num_bytes:
                raise TransportError("the block lies outside of the producer's region")
            self._region.view[offset : offset + block.num_bytes] = rows

    def is_settled(self, offset: int) -> bool:
        return True

    def close(self) -> None:
        with self._lock:
            self._maps.clear()  # unmapped once nobody reads

    def _map(self, text: str) -> mmap.mmap:
        try:
            place = _Place.parse(text)
        except ValueError:
            raise TransportError(f"{text[:100]!r} names no region") from None
        with self._lock:
            found = self._maps.get(place)
            if found is None:
                self._maps = {known: one for known, one in self._maps.items() if known.is_there()}
                found = self._maps[place] = _open(place)
            return found


def _open(place: _Place) -> mmap.mmap:
    if not place.is_there():
        raise TransportError(
            "the producer's memory is not to be had here: another host, PID namespace or user, or gone"
        )
    try:
        fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"the producer's memory cannot be opened: {error.strerror}") from None
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
