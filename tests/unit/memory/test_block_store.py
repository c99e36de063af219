"""The block store: who may be seen, who may go, and what it never lets happen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from producer.memory.arena import PAGE_BYTES, Arena
from producer.memory.block_store import Block, BlockState, BlockStore, StoreFullError

PAGES = 4


def full_store(num_blocks: int = PAGES) -> tuple[BlockStore, list[Block]]:
    """A store of `num_blocks` pages with a ready block in each: "0" is the least recently used."""
    store = BlockStore(num_blocks * PAGE_BYTES)
    return store, [ready(store, str(number)) for number in range(num_blocks)]


def ready(store: BlockStore, key: str, num_bytes: int = PAGE_BYTES) -> Block:
    block = store.reserve(key, num_bytes)
    store.commit(block, f"info of {key}")
    return block


def seen(store: BlockStore) -> set[str]:
    """Visible keys, without using any."""
    return {key for key, block in store._blocks.items() if block.state is BlockState.READY}


# Visibility


def test_a_block_is_seen_from_its_commit_on() -> None:
    store = BlockStore(PAGES * PAGE_BYTES)
    block = store.reserve("a", 100)
    assert store.lookup("a") is None
    assert store.pin("a") is None
    store.commit(block, "info")
    assert store.lookup("a") is block
    assert block.info == "info"


def test_a_quarantined_block_is_hidden_and_its_memory_kept() -> None:
    store = BlockStore(PAGES * PAGE_BYTES)
    block = store.reserve("a", PAGE_BYTES)
    store.quarantine(block)
    assert store.lookup("a") is None
    assert store.used_bytes == PAGE_BYTES
    again = ready(store, "a")
    assert again.offset != block.offset
    store.free(block)
    assert store.lookup("a") is again
    assert store.used_bytes == PAGE_BYTES


def test_unknown_keys_are_none() -> None:
    store, _ = full_store()
    assert store.lookup("unknown") is None
    assert store.pin("unknown") is None
    assert not store.is_pinned("unknown")


# Lifecycle

ALLOWED = {
    (BlockState.WRITING, BlockState.READY),
    (BlockState.WRITING, BlockState.QUARANTINED),
    (BlockState.WRITING, BlockState.FREED),
    (BlockState.READY, BlockState.FREED),
    (BlockState.QUARANTINED, BlockState.FREED),
}
MOVES = {BlockState.READY: "commit", BlockState.QUARANTINED: "quarantine", BlockState.FREED: "free"}


def block_in(state: BlockState, store: BlockStore) -> Block:
    block = store.reserve("a", 100)
    if state is not BlockState.WRITING:
        getattr(store, MOVES[state])(block)
    assert block.state is state
    return block


@pytest.mark.parametrize("after", MOVES)
@pytest.mark.parametrize("before", BlockState)
def test_moves(before: BlockState, after: BlockState) -> None:
    store = BlockStore(PAGES * PAGE_BYTES)
    block = block_in(before, store)
    if (before, after) in ALLOWED:
        getattr(store, MOVES[after])(block)
        assert block.state is after
    else:
        with pytest.raises(AssertionError):
            getattr(store, MOVES[after])(block)
        assert block.state is before


@pytest.mark.parametrize("before", BlockState)
def test_nothing_goes_back_to_writing(before: BlockState) -> None:
    store = BlockStore(PAGES * PAGE_BYTES)
    with pytest.raises(AssertionError):
        store._move(block_in(before, store), BlockState.WRITING)


def test_freeing_twice_does_not_touch_the_block_that_came_after() -> None:
    store = BlockStore(PAGES * PAGE_BYTES)
    old = ready(store, "a")
    store.free(old)
    new = ready(store, "a")
    with pytest.raises(AssertionError):
        store.free(old)
    assert store.lookup("a") is new


def test_a_key_has_one_block() -> None:
    store, _ = full_store()
    with pytest.raises(AssertionError, match="0"):
        store.reserve("0", 1)


def test_a_pinned_block_cannot_be_freed() -> None:
    store, _ = full_store()
    block = store.pin("0")
    with pytest.raises(AssertionError):
        store.free(block)
    assert store.lookup("0") is block


def test_a_pin_is_taken_off_once() -> None:
    store, _ = full_store()
    block = store.pin("0")
    store.unpin(block)
    with pytest.raises(AssertionError):
        store.unpin(block)


# Eviction


def test_the_least_recently_used_goes_first() -> None:
    store, _ = full_store()
    store.lookup("0")
    store.unpin(store.pin("1"))
    for key in ("new", "newer"):
        ready(store, key)
    assert seen(store) == {"0", "1", "new", "newer"}
    assert store.num_evictions == 2


def test_no_more_goes_than_is_needed() -> None:
    store, _ = full_store()
    ready(store, "large", 2 * PAGE_BYTES)
    assert seen(store) == {"2", "3", "large"}


def test_a_pinned_block_is_stepped_over() -> None:
    store, blocks = full_store()
    store.pin("0")
    ready(store, "new")
    assert store.lookup("0") is blocks[0]
    assert store.lookup("1") is None


@pytest.mark.parametrize("hold", ["pinned", "writing", "quarantined"])
def test_what_is_held_leaves_no_room(hold: str) -> None:
    store = BlockStore(PAGE_BYTES)
    block = store.reserve("a", PAGE_BYTES)
    if hold == "pinned":
        store.commit(block)
        store.pin("a")
    elif hold == "quarantined":
        store.quarantine(block)
    with pytest.raises(StoreFullError, match="no room for 1 bytes: 4096 of 4096 in use"):
        store.reserve("b", 1)


def test_every_pin_must_go() -> None:
    store = BlockStore(PAGE_BYTES)
    block = ready(store, "a")
    store.pin("a")
    store.pin("a")
    store.unpin(block)
    assert store.is_pinned("a")
    with pytest.raises(StoreFullError):
        store.reserve("b", 1)
    store.unpin(block)
    assert not store.is_pinned("a")
    store.reserve("b", 1)


def test_what_can_never_fit_evicts_nothing() -> None:
    store, _ = full_store()
    with pytest.raises(StoreFullError):
        store.reserve("large", PAGES * PAGE_BYTES + 1)
    assert len(seen(store)) == PAGES


@given(st.lists(st.integers(1, 5 * PAGE_BYTES), min_size=1, max_size=12), st.integers(1, 12 * PAGE_BYTES))
def test_whatever_is_unpinned_makes_room(sizes: list[int], wanted: int) -> None:
    store = BlockStore(12 * PAGE_BYTES)
    for number, num_bytes in enumerate(sizes):
        ready(store, str(number), num_bytes)
    store.reserve("wanted", wanted)


def test_small_blocks_make_room_by_the_page() -> None:
    store = BlockStore(PAGES * PAGE_BYTES)
    for number in range(PAGES):
        ready(store, str(number), 200)
    store.reserve("wanted", 2 * PAGE_BYTES)
    assert seen(store) == {"2", "3"}


def test_who_is_about_to_lose_memory_is_told_while_it_has_it() -> None:
    told: list[tuple[str, int]] = []
    store = BlockStore(PAGE_BYTES, on_free=lambda block: told.append((block.key, store.used_bytes)))
    ready(store, "a")
    ready(store, "b")
    store.quarantine(store.reserve("c", 1))
    assert told == [("a", PAGE_BYTES), ("b", PAGE_BYTES)]


# Several at once


def test_all_of_a_request_has_room() -> None:
    store, _ = full_store()
    blocks = store.reserve_all({"a": PAGE_BYTES, "b": 2 * PAGE_BYTES})
    assert [block.key for block in blocks] == ["a", "b"]
    assert seen(store) == {"3"}


def test_half_a_request_takes_no_room() -> None:
    store, _ = full_store()
    store.pin("3")
    with pytest.raises(StoreFullError):
        store.reserve_all({"a": 2 * PAGE_BYTES, "b": 2 * PAGE_BYTES})
    assert store.lookup("3") is not None
    assert len(store.reserve_all({"a": PAGE_BYTES, "b": 2 * PAGE_BYTES})) == 2


def test_a_request_that_can_never_fit_evicts_nothing() -> None:
    store, _ = full_store()
    with pytest.raises(StoreFullError):
        store.reserve_all({"a": 3 * PAGE_BYTES, "b": 3 * PAGE_BYTES})
    assert len(seen(store)) == PAGES


class StoreMachine(RuleBasedStateMachine):
    """The store beside a model: blocks by state, in the order of their last use."""

    keys = st.sampled_from("abcdefgh")
    sizes = st.integers(1, 5 * PAGE_BYTES)

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[Block] = []
        self.store = BlockStore(12 * PAGE_BYTES, on_free=self.freed.append)
        self.writing: dict[str, Block] = {}
        self.ready: dict[str, Block] = {}  # least recently used first
        self.pins: dict[str, int] = {}
        self.quarantined: list[Block] = []
        self.generations: set[int] = set()

    @rule(wanted=st.dictionaries(keys, sizes, min_size=1, max_size=3))
    def reserve_all(self, wanted: dict[str, int]) -> None:
        wanted = {key: size for key, size in wanted.items() if key not in self.writing and key not in self.ready}
        self.freed.clear()
        can_fit = sum(map(Arena.round_up, wanted.values())) <= self.store.num_bytes - self._held_bytes()
        try:
            blocks = self.store.reserve_all(wanted)
        except StoreFullError:
            assert can_fit or not self.freed, "evicted for nothing"
            blocks = []
        else:
            assert can_fit
        evicted = [block for block in self.freed if block.key in self.ready]  # without a failed attempt's own
        unpinned = [block for key, block in self.ready.items() if not self.pins.get(key)]
        assert evicted == unpinned[: len(evicted)], "not the least recently used"
        for block in evicted:
            del self.ready[block.key]
        for block in blocks:
            assert block.generation not in self.generations
            self.generations.add(block.generation)
            self.writing[block.key] = block

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), end=st.sampled_from(["commit", "free", "quarantine"]))
    def end_writing(self, data: st.DataObject, end: str) -> None:
        block = self.writing.pop(data.draw(st.sampled_from(sorted(self.writing))))
        getattr(self.store, end)(block)
        if end == "commit":
            self.ready[block.key] = block
        elif end == "quarantine":
            self.quarantined.append(block)

    @rule(key=keys, pin=st.booleans())
    def use(self, key: str, pin: bool) -> None:
        found = self.store.pin(key) if pin else self.store.lookup(key)
        assert found is self.ready.get(key)
        if found is not None:
            if not self.pins.get(key):
                self.ready[key] = self.ready.pop(key)
            self.pins[key] = self.pins.get(key, 0) + pin

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for key, pins in self.pins.items() if pins)))
        self.store.unpin(self.ready[key])
        self.pins[key] -= 1
        if not self.pins[key]:
            self.ready[key] = self.ready.pop(key)

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        self.store.free(self.quarantined.pop())

    @invariant()
    def blocks_never_overlap(self) -> None:
        held = sorted([*self.writing.values(), *self.ready.values(), *self.quarantined], key=lambda block: block.offset)
        ends = [block.offset + Arena.round_up(block.num_bytes) for block in held]
        assert all(end <= after.offset for end, after in zip(ends, held[1:], strict=False))
        assert self.store.used_bytes == sum(Arena.round_up(block.num_bytes) for block in held) <= self.store.num_bytes

    @invariant()
    def counts_are_right(self) -> None:
        num_pinned = sum(1 for pins in self.pins.values() if pins)
        assert self.store.num_blocks == len(self.writing) + len(self.ready)
        assert self.store.num_pinned == len(self.writing) + num_pinned

    def _held_bytes(self) -> int:
        pinned = [block for key, block in self.ready.items() if self.pins.get(key)]
        return sum(Arena.round_up(block.num_bytes) for block in [*self.writing.values(), *pinned, *self.quarantined])


TestStoreAgainstAModel = StoreMachine.TestCase
