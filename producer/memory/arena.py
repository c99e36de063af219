"""Which bytes of a region are free: an allocator of contiguous runs, pure arithmetic."""

from collections import OrderedDict

PAGE_BYTES = 4096
_PROBES = 8


class Arena:
    """Segregated free lists with merging neighbours: allocate and free are O(1), whatever the number of runs.

    Offsets and sizes are in bytes, multiples of `PAGE_BYTES`. Not thread-safe.
    """

    def __init__(self, num_bytes: int) -> None:
        """Manages offsets 0 to `num_bytes`, rounded down to whole pages."""
        self.num_bytes = num_bytes // PAGE_BYTES * PAGE_BYTES
        self.free_bytes = 0
        self._size_at: dict[int, int] = {}  # offset of a free run -> its size
        self._start_of: dict[int, int] = {}  # end of a free run -> its offset
        # Bin b has the free runs of 2^b to 2^(b+1) - 1 pages. No plain dict: the way to its first key is over the gaps
        # that earlier first ones left, a million of them at worst.
        self._bins: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(64)]
        self._filled = 0  # bit b is set where bin b is not empty
        if self.num_bytes:
            self._add(0, self.num_bytes)

    @staticmethod
    def round_up(num_bytes: int) -> int:
        """Bytes that an allocation of `num_bytes` takes."""
        return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of a run of `round_up(num_bytes)` bytes, or None where no free run is known to be that long."""
        size = self.round_up(num_bytes)
        start = self._find(size)
        if start is None:
            return None
        rest = self._remove(start) - size
        if rest:
            self._add(start + size, rest)
        return start

    def free(self, start: int, num_bytes: int) -> None:
        """Gives back what `allocate(num_bytes)` returned as `start`."""
        end = start + self.round_up(num_bytes)
        if end in self._size_at:
            end += self._remove(end)
        if start in self._start_of:
            before = self._start_of[start]
            self._remove(before)
            start = before
        self._add(start, end - start)

    def _find(self, size: int) -> int | None:
        own = _bin(size)
        for _, start in zip(range(_PROBES), self._bins[own], strict=False):
            if self._size_at[start] >= size:
                return start
        larger = self._filled >> own + 1
        if not larger:
            return None
        return next(iter(self._bins[own + (larger & -larger).bit_length()]))

    def _add(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_of[start + size] = start
        number = _bin(size)
        self._bins[number][start] = None
        self._filled |= 1 << number
        self.free_bytes += size

    def _remove(self, start: int) -> int:
        size = self._size_at.pop(start)
        del self._start_of[start + size]
        number = _bin(size)
        del self._bins[number][start]
        if not self._bins[number]:
            self._filled ^= 1 << number
        self.free_bytes -= size
        return size


def _bin(size: int) -> int:
    return (size // PAGE_BYTES).bit_length() - 1
