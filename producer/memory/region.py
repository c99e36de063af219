"""One contiguous region of host memory that several processes map.

It is an anonymous file (memfd): it has no name, so nothing is left behind when its processes are killed, and the size
of /dev/shm does not bound it. Others reach it by an inherited descriptor, or through /proc while the owner lives.
"""

import ctypes
import mmap
import os
from types import TracebackType


class SharedRegion:
    """Owns one mapping of the region. The memory lives until the last process that mapped it has gone."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Maps `num_bytes` of `fd` and owns `fd` from here on; `create`, `adopt` and `attach` are the ways in."""
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)
        self.view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor

    @classmethod
    def create(cls, name: str, num_bytes: int) -> "SharedRegion":
        """A new zeroed region; `name` shows in /proc only. Pages are taken from the host when first written.

        Raises:
            OSError: the host cannot map so much.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            return cls(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int) -> "SharedRegion":
        """The region behind an inherited descriptor."""
        return cls(fd, os.fstat(fd).st_size)

    @classmethod
    def attach(cls, pid: int, fd: int) -> "SharedRegion":
        """The region that process `pid` of this user holds as descriptor `fd`.

        Raises:
            OSError: the process has gone, or belongs to another user.
        """
        return cls.adopt(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    def close(self) -> None:
        """Unmaps, if no view of the memory is held any more; a region still in use goes with its process."""
        if self._map.closed:
            return
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            return
        os.close(self.fd)

    def __enter__(self) -> "SharedRegion":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
