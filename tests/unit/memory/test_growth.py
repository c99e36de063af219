"""The arena, the store and the pool with a thousand entries, and with a million: every operation takes as much.

Counted, not timed: calls of functions, and lines of the code itself, since a loop makes no calls.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from producer.core import Lease
from producer.embedding_pool import LEASE_MARGIN_S, EmbeddingPool
from producer.errors import NotFoundError
from producer.memory.arena import PAGE_BYTES, Arena
from producer.memory.block_store import BlockStore
from tests.kit.counting import count_lines, counted_calls
from tests.unit.conftest import EPOCH, INFO, LEASE_S, SHAPE, Clock, key_of, rows_of

FEW, MANY, MOST = 1_000, 100_000, 1_000_000
FILES = ("producer/memory/arena.py", "producer/memory/block_store.py", "producer/embedding_pool.py")
NUM_ENDING = 50
ROWS = rows_of(0)
Work = dict[str, tuple[int, int]]
"""By operation: calls, lines."""


def work(operation: Callable[[], object]) -> tuple[int, int]:
    """What an operation takes; it is done twice."""
    with counted_calls() as calls:
        operation()
    return calls.by_function.total(), count_lines(operation, FILES)


@contextmanager
def uncollected() -> Iterator[None]:
    """A million new objects without Python looking again and again for cycles among them."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# The arena


def arena_work(num_runs: int) -> Work:
    """An arena with `num_runs` free pages, each alone."""
    arena = Arena(2 * num_runs * PAGE_BYTES)
    arena.allocate(arena.num_bytes)
    pages = range(0, arena.num_bytes, PAGE_BYTES)
    for start in pages[::2]:
        arena.free(start, PAGE_BYTES)
    kept = iter(pages[1::2])
    return {
        "allocate a page": work(lambda: arena.allocate(PAGE_BYTES)),
        "allocate what no run is long enough for": work(lambda: arena.allocate(2 * PAGE_BYTES)),
        "free between two free ones": work(lambda: arena.free(next(kept), PAGE_BYTES)),
        "allocate two pages": work(lambda: arena.allocate(2 * PAGE_BYTES)),
    }


def test_the_arena_takes_the_same_however_many_runs_are_free() -> None:
    with uncollected():
        few, many = map(arena_work, (FEW, MOST))
    assert few == many


# The store


def store_work(num_blocks: int) -> Work:
    """A full store of `num_blocks` pages."""
    store, names = BlockStore(num_blocks * PAGE_BYTES), map(str, range(1 << 40))
    for _ in range(num_blocks):
        store.commit(store.reserve(next(names), PAGE_BYTES))
    middle = iter(range(num_blocks // 2, num_blocks))
    pinned: list[Any] = []
    return {
        "lookup": work(lambda: store.lookup(str(next(middle)))),
        "miss": work(lambda: store.lookup("unknown")),
        "pin": work(lambda: pinned.append(store.pin(str(next(middle))))),
        "unpin": work(lambda: store.unpin(pinned.pop())),
        "reserve and commit, which evicts": work(lambda: store.commit(store.reserve(next(names), PAGE_BYTES))),
        "free": work(lambda: store.free(store.lookup(str(next(middle))))),  # type: ignore[arg-type]
        "reserve and commit": work(lambda: store.commit(store.reserve(next(names), PAGE_BYTES))),
        "counts": work(lambda: (store.num_blocks, store.num_pinned, store.used_bytes)),
    }


def test_the_store_takes_the_same_however_many_blocks_it_has() -> None:
    with uncollected():
        few, many = map(store_work, (FEW, MANY))
    assert few == many


def test_a_block_evicts_as_many_as_lie_in_its_way_and_no_more() -> None:
    """So that each block is evicted once for having been put once, whatever is put after it."""
    store = BlockStore(1024 * PAGE_BYTES)
    for number in range(1024):
        store.commit(store.reserve(str(number), PAGE_BYTES))
    before = work(lambda: store.commit(store.reserve(f"new {store.num_evictions}", PAGE_BYTES)))
    with counted_calls() as calls:
        store.commit(store.reserve("large", 100 * PAGE_BYTES))
    assert store.num_evictions == 102
    assert calls.by_function.total() < 100 * before[0]


# The pool


class NoMemory:
    """A region of any size without memory behind it. What is written anywhere lands in the same scratch: nothing can be
    read back, and blocks do not keep apart.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.view: Any = self
        self._scratch = memoryview(bytearray(1 << 16))

    def __getitem__(self, part: slice) -> memoryview:
        return self._scratch[: part.stop - part.start]


def full_pool(num_blocks: int, clock: Clock) -> tuple[EmbeddingPool, list[Lease]]:
    """A pool full of embeddings, and leases on a third of them; the first `NUM_ENDING` end a second earlier."""
    region: Any = NoMemory(num_blocks * PAGE_BYTES)
    pool = EmbeddingPool(region, epoch=EPOCH, lease_s=LEASE_S, max_leases=num_blocks, clock=clock)
    for number in range(num_blocks):
        pool.store.commit(pool.store.reserve(key_of(number), SHAPE.block_bytes), INFO)
    leases = [pool.grant(key_of(number)) for number in range(NUM_ENDING)]
    clock.now_s += 1
    return pool, leases + [pool.grant(key_of(number)) for number in range(NUM_ENDING, num_blocks // 3)]


def pool_work(num_blocks: int) -> Work:
    clock = Clock()
    pool, leases = full_pool(num_blocks, clock)
    numbers, leased = iter(range(num_blocks, 1 << 40)), iter(leases[2 * NUM_ENDING :])
    found = {
        "grant": work(lambda: pool.grant(key_of(num_blocks // 2))),
        "grant that replaces": work(lambda: pool.grant((old := next(leased)).key, "grpc", replaces=old.lease_id)),
        "miss": work(lambda: _missed(pool)),
        "release": work(lambda: pool.release(next(leased).lease_id)),
        "release of what had ended": work(lambda: pool.release("unknown")),
        "put, which evicts": work(lambda: pool.put(key_of(next(numbers)), INFO, ROWS)),
        "put of what is there": work(lambda: pool.put(key_of(0), INFO, ROWS)),
        "open": work(lambda: _opened(pool, next(leased))),
        "sweep that ends no lease": work(pool.expire),
    }
    number = pool.num_leases
    clock.now_s += LEASE_S + LEASE_MARGIN_S - 1
    with counted_calls() as calls:
        pool.expire()
    assert pool.num_leases == number - NUM_ENDING
    return found | {f"sweep that ends {NUM_ENDING}": (calls.by_function.total(), 0)}


def _missed(pool: EmbeddingPool) -> None:
    with pytest.raises(NotFoundError):
        pool.grant(key_of(1 << 50))


def _opened(pool: EmbeddingPool, lease: Lease) -> None:
    with pool.open_block(lease.lease_id):
        pass


def test_the_pool_takes_the_same_however_many_embeddings_and_leases_it_has() -> None:
    with uncollected():
        few, many = map(pool_work, (FEW, MOST))
    assert few == many
