"""The arena: whatever the order of calls, runs never overlap and no byte is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from producer.memory.arena import PAGE_BYTES, Arena

NUM_PAGES = 40
sizes = st.integers(1, 12 * PAGE_BYTES)


@pytest.mark.parametrize(("num_bytes", "taken"), [(1, 4096), (4096, 4096), (4097, 8192), (0, 0)])
def test_an_allocation_takes_whole_pages(num_bytes: int, taken: int) -> None:
    assert Arena.round_up(num_bytes) == taken


def test_a_part_of_a_page_at_the_end_is_not_managed() -> None:
    arena = Arena(2 * PAGE_BYTES + 100)
    assert arena.num_bytes == arena.free_bytes == 2 * PAGE_BYTES


def test_all_of_it_can_be_one_run() -> None:
    arena = Arena(4 * PAGE_BYTES)
    assert arena.allocate(4 * PAGE_BYTES) == 0
    assert arena.free_bytes == 0
    assert arena.allocate(1) is None


def test_less_than_a_page_holds_nothing() -> None:
    assert Arena(PAGE_BYTES - 1).allocate(1) is None


def test_freeing_between_two_free_neighbours_makes_one_run() -> None:
    arena = Arena(3 * PAGE_BYTES)
    starts = [arena.allocate(PAGE_BYTES) for _ in range(3)]
    assert starts == [0, PAGE_BYTES, 2 * PAGE_BYTES]
    for start in (0, 2 * PAGE_BYTES, PAGE_BYTES):
        arena.free(start, PAGE_BYTES)
    assert arena.allocate(3 * PAGE_BYTES) == 0


def test_a_long_enough_run_is_found_behind_short_ones_of_its_bin() -> None:
    """Runs of 4 to 7 pages share a bin; the longest was freed last."""
    arena = Arena(64 * PAGE_BYTES)
    gaps = []
    for pages in (4, 5, 6, 7):
        gaps.append((arena.allocate(pages * PAGE_BYTES), pages * PAGE_BYTES))
        arena.allocate(PAGE_BYTES)
    arena.allocate(arena.free_bytes)
    for start, size in gaps:
        arena.free(start, size)
    assert arena.allocate(7 * PAGE_BYTES) == gaps[3][0]


@given(st.lists(sizes, max_size=NUM_PAGES), st.randoms(use_true_random=False))
def test_freeing_everything_in_any_order_restores_one_run(wanted: list[int], random: object) -> None:
    arena = Arena(NUM_PAGES * PAGE_BYTES)
    runs = [(start, size) for size in wanted if (start := arena.allocate(size)) is not None]
    random.shuffle(runs)
    for start, size in runs:
        arena.free(start, size)
    assert arena.free_bytes == arena.num_bytes
    assert arena.allocate(arena.num_bytes) == 0


class ArenaMachine(RuleBasedStateMachine):
    """The arena beside a naive list of which pages are taken."""

    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(NUM_PAGES * PAGE_BYTES)
        self.is_taken = [False] * NUM_PAGES

    @precondition(lambda self: not all(self.is_taken))
    @rule(target=runs, size=sizes)
    def allocate(self, size: int) -> tuple[int, int] | None:
        num_pages = -(-size // PAGE_BYTES)
        start = self.arena.allocate(size)
        if start is None:
            # Bins are probed, not searched: sure to be found is a run of the next power of two.
            assert self._longest_free() < 1 << num_pages.bit_length()
            return None
        pages = slice(start // PAGE_BYTES, start // PAGE_BYTES + num_pages)
        assert start % PAGE_BYTES == 0
        assert self.is_taken[pages] == [False] * num_pages
        self.is_taken[pages] = [True] * num_pages
        return start, size

    @rule(run=consumes(runs))
    def free(self, run: tuple[int, int] | None) -> None:
        if run is not None:
            start, size = run
            self.arena.free(start, size)
            num_pages = -(-size // PAGE_BYTES)
            self.is_taken[start // PAGE_BYTES : start // PAGE_BYTES + num_pages] = [False] * num_pages

    @invariant()
    def no_byte_is_lost(self) -> None:
        assert self.arena.free_bytes == self.is_taken.count(False) * PAGE_BYTES

    def _longest_free(self) -> int:
        return max(len(run) for run in "".join(" x"[taken] for taken in self.is_taken).split("x"))


TestArenaAgainstANaiveList = ArenaMachine.TestCase
