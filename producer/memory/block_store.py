"""Blocks by content key in one region: reserved, written once, read while pinned, evicted when nobody needs them."""

import enum
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from producer.memory.arena import Arena


class BlockState(enum.Enum):
    """Life of a block. What may follow what is in `_MOVES`; every other move is our own mistake."""

    WRITING = "writing"
    """Reserved; its writer fills it. Nobody else sees it."""
    READY = "ready"
    """Whole and visible. Evicted only while no pin holds it."""
    QUARANTINED = "quarantined"
    """Its writer gave up, but a transport may still write into it. Not visible, not reused."""
    FREED = "freed"
    """Its memory belongs to others."""


_MOVES = {
    BlockState.WRITING: {BlockState.READY, BlockState.QUARANTINED, BlockState.FREED},
    BlockState.READY: {BlockState.FREED},
    BlockState.QUARANTINED: {BlockState.FREED},
    BlockState.FREED: set(),
}


class StoreFullError(Exception):
    """No room: all that could be evicted was, and the rest is pinned or being written."""


@dataclass(eq=False, slots=True)
class Block:
    """A run of bytes at `offset`. Only its store changes it."""

    key: str
    offset: int
    num_bytes: int
    generation: int
    info: Any = None
    """What the owner of the store keeps with the block."""
    state: BlockState = BlockState.WRITING
    pins: int = field(default=0)


class BlockStore:
    """Owns which block lies where. Thread-safe; O(1) but for evictions. Bytes never pass through here."""

    def __init__(self, num_bytes: int, on_free: Callable[[Block], None] = lambda block: None) -> None:
        """A store of `num_bytes`; `on_free` is called, under the lock, for each block about to be freed."""
        self._lock = threading.RLock()
        self._arena = Arena(num_bytes)
        self._blocks: dict[str, Block] = {}
        self._evictable: OrderedDict[str, Block] = OrderedDict()  # READY and unpinned, least recently used first
        self._evictable_bytes = 0
        self._generations = itertools.count(1)
        self._on_free = on_free
        self.num_evictions = 0

    @property
    def num_bytes(self) -> int:
        return self._arena.num_bytes

    @property
    def used_bytes(self) -> int:
        return self._arena.num_bytes - self._arena.free_bytes

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_pinned(self) -> int:
        """Blocks that are being written or are pinned."""
        return len(self._blocks) - len(self._evictable)

    def reserve(self, key: str, num_bytes: int) -> Block:
        """Room for a block of `num_bytes` that the caller writes and then commits, quarantines or frees.

        Raises:
            StoreFullError: there is no such room now.
        """
        return self.reserve_all({key: num_bytes})[0]

    def reserve_all(self, sizes: dict[str, int]) -> list[Block]:
        """Room for all of `sizes` (bytes by key), or for none of it: half a request would only block others.

        Raises:
            StoreFullError: there is no such room now.
        """
        with self._lock:
            blocks: list[Block] = []
            try:
                if sum(map(Arena.round_up, sizes.values())) > self._arena.free_bytes + self._evictable_bytes:
                    raise self._full(sizes)  # before anything is evicted for it
                for key, num_bytes in sizes.items():
                    blocks.append(self._reserve(key, num_bytes))
            except StoreFullError:
                for block in blocks:
                    self.free(block)
                raise
            return blocks

    def commit(self, block: Block, info: Any = None) -> None:
        """Makes a written block visible."""
        with self._lock:
            self._move(block, BlockState.READY)
            block.info = info
            if not block.pins:
                self._let_go(block)

    def quarantine(self, block: Block) -> None:
        """Hides a block for good whose memory must not be reused yet. `free` ends it."""
        with self._lock:
            self._move(block, BlockState.QUARANTINED)
            del self._blocks[block.key]

    def free(self, block: Block) -> None:
        """Gives the memory of a block back that is not pinned."""
        with self._lock:
            assert not block.pins, block
            is_listed = block.state is not BlockState.QUARANTINED
            self._move(block, BlockState.FREED)
            if is_listed:
                del self._blocks[block.key]
                self._hold(block)
            self._on_free(block)
            self._arena.free(block.offset, block.num_bytes)

    def lookup(self, key: str) -> Block | None:
        """The visible block of `key`, now the most recently used one."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None or block.state is not BlockState.READY:
                return None
            if not block.pins:
                self._evictable.move_to_end(key)
            return block

    def pin(self, key: str) -> Block | None:
        """The visible block of `key`, which stays until `unpin`."""
        with self._lock:
            block = self.lookup(key)
            if block is not None:
                self._hold(block)
                block.pins += 1
            return block

    def is_pinned(self, key: str) -> bool:
        """Whether the block of `key` is visible and pinned."""
        block = self._blocks.get(key)
        return block is not None and block.state is BlockState.READY and block.pins > 0

    def unpin(self, block: Block) -> None:
        """Takes one pin off."""
        with self._lock:
            assert block.pins > 0, block
            block.pins -= 1
            if not block.pins:
                self._let_go(block)

    def _reserve(self, key: str, num_bytes: int) -> Block:
        assert key not in self._blocks, key
        offset = self._arena.allocate(num_bytes)
        while offset is None:
            if not self._evictable:
                raise self._full({key: num_bytes})
            self.free(next(iter(self._evictable.values())))
            self.num_evictions += 1
            offset = self._arena.allocate(num_bytes)
        block = Block(key, offset, num_bytes, next(self._generations))
        self._blocks[key] = block
        return block

    def _full(self, sizes: dict[str, int]) -> StoreFullError:
        wanted = sum(sizes.values())
        return StoreFullError(f"no room for {wanted} bytes: {self.used_bytes} of {self.num_bytes} in use")

    def _let_go(self, block: Block) -> None:
        self._evictable[block.key] = block
        self._evictable_bytes += Arena.round_up(block.num_bytes)

    def _hold(self, block: Block) -> None:
        if self._evictable.pop(block.key, None) is not None:
            self._evictable_bytes -= Arena.round_up(block.num_bytes)

    def _move(self, block: Block, state: BlockState) -> None:
        assert state in _MOVES[block.state], (block, state)
        block.state = state
