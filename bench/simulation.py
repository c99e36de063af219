"""The pool's allocator at sizes that no machine here has, up to 64 GiB: where blocks would lie, without their bytes.

Not simulated: writing and reading, so nothing of what memory costs; leases, which are pins here; and several threads.
"""

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from producer.memory.block_store import Block, BlockStore, StoreFullError

GIB = 1 << 30
SIZES_GIB = (0.25, 1, 4, 16, 64)
ROW_BYTES = 4096
"""Of Qwen2.5-VL-3B, in bfloat16."""
PINNED = 0.1
"""The part of the pool that pins hold, at most."""
MIXES: dict[str, tuple[int, int]] = {"small": (15, 15), "photos": (15, 1024), "mixed": (15, 16384)}
"""Fewest and most rows of an embedding; each power of two between is as likely. 15 rows and a header are 64 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """One pool, full, after each of its blocks was evicted once or more."""

    mix: str
    gib: float
    entries: int
    put_us: float
    """CPU time of a reserve with its evictions, and a commit."""
    pin_us: float
    """Of a lookup, a pin and an unpin of a random block."""
    evicted: float
    """Blocks that each put pushed out; bytes that come are bytes that go, so 1 is what there must be."""
    used: float
    """The part of the memory that holds blocks."""
    free_runs: int
    refused: int
    """Puts for which no room could be made, although the pins hold a tenth at most."""
    collect_ms: float
    """A full collection by Python's garbage collector, during which nothing else runs."""


def simulate(mix: str, gib: float, *, operations: int, seed: int) -> PoolFigures:
    """Fills a pool, turns it over, and measures `operations` puts and as many pins."""
    pool = _Pool(mix, int(gib * GIB), seed)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        pool.turn_over()
        evictions = pool.store.num_evictions
        put_us = _us(pool.put, operations)
        evicted = (pool.store.num_evictions - evictions) / operations
        pin_us = _us(pool.use, operations)
    finally:
        gc.enable()
    since_s = time.perf_counter()
    gc.collect()
    collect_ms = (time.perf_counter() - since_s) * 1000
    gc.unfreeze()
    return PoolFigures(
        mix=mix,
        gib=gib,
        entries=pool.store.num_blocks,
        put_us=put_us,
        pin_us=pin_us,
        evicted=evicted,
        used=pool.store.used_bytes / pool.store.num_bytes,
        free_runs=len(pool.store._arena._size_at),
        refused=pool.refused,
        collect_ms=collect_ms,
    )


class _Pool:
    """A store under a load: blocks of random sizes, and pins on some that go after a while."""

    def __init__(self, mix: str, num_bytes: int, seed: int) -> None:
        self.store = BlockStore(num_bytes)
        self.refused = 0
        self._draw = random.Random(seed)
        self._sizes = self._drawn_sizes(*MIXES[mix])
        self._pinned: deque[Block] = deque()
        self._pinned_bytes = 0
        self._number = 0

    def turn_over(self) -> None:
        """Puts until as many bytes have come as the pool has, and half as many again."""
        left = self.store.num_bytes * 3 // 2
        while left > 0:
            left -= self.put()

    def put(self) -> int:
        """A new block, one in ten of which is pinned for a while; its bytes."""
        size = next(self._sizes)
        self._number += 1
        key = str(self._number)
        try:
            self.store.commit(self.store.reserve(key, size))
        except StoreFullError:
            self.refused += 1
            return size
        if self._draw.random() < PINNED:
            self._pin(key)
        return size

    def use(self) -> None:
        """A lease on a block, which may have gone, and its end."""
        block = self.store.pin(str(self._number - self._draw.randrange(self.store.num_blocks)))
        if block is not None:
            self.store.unpin(block)

    def _pin(self, key: str) -> None:
        block = self.store.pin(key)
        assert block is not None
        self._pinned.append(block)
        self._pinned_bytes += block.num_bytes
        while self._pinned_bytes > PINNED * self.store.num_bytes:
            old = self._pinned.popleft()
            self._pinned_bytes -= old.num_bytes
            self.store.unpin(old)

    def _drawn_sizes(self, fewest: int, most: int) -> Iterator[int]:
        powers = (most // fewest).bit_length() - 1
        while True:
            rows = fewest << self._draw.randint(0, powers)
            yield (rows if rows == fewest else self._draw.randint(rows // 2, rows)) * ROW_BYTES + 192


def _us(operation: Callable[[], object], times: int) -> float:
    """CPU time of one, in microseconds: the median of ten runs, so that a pause counts in none or one of them."""
    found = []
    for _ in range(10):
        since_s = time.thread_time()
        for _ in range(times // 10):
            operation()
        found.append((time.thread_time() - since_s) / (times // 10))
    return sorted(found)[5] * 1e6


def table(figures: list[PoolFigures]) -> list[str]:
    """As text."""
    head = "pool      GiB   entries   put, us   pin, us   evicted a put   used   free runs   refused   full GC, ms"
    return [head] + [
        f"{one.mix:7} {one.gib:5.2f} {one.entries:9} {one.put_us:9.2f} {one.pin_us:9.2f} {one.evicted:15.2f} "
        f"{one.used:6.1%} {one.free_runs:11} {one.refused:9} {one.collect_ms:14.1f}"
        for one in figures
    ]


def rows(figures: list[PoolFigures]) -> list[dict[str, object]]:
    """As the results have them."""
    return [asdict(one) for one in figures]
