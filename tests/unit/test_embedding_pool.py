"""The embedding pool: whole or absent, pinned while leased, and every lease ends."""

import contextlib
import itertools
import threading
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from producer.core import Lease
from producer.embedding_pool import LEASE_MARGIN_S, EmbeddingPool
from producer.errors import NotFoundError, OverloadedError, ServiceError
from producer.memory.region import SharedRegion
from producer.wire.block import BlockError, BlockIdentity, read_block
from producer.wire.contract import Reason
from tests.unit.conftest import EPOCH, INFO, LEASE_S, NUM_BLOCKS, SHAPE, Clock, key_of, rows_of

END_S = LEASE_S + LEASE_MARGIN_S


def put(pool: EmbeddingPool, *numbers: int) -> None:
    for number in numbers:
        pool.put(key_of(number), INFO, rows_of(number))


def put_large(pool: EmbeddingPool, number: int) -> None:
    """One of two pages."""
    shape = replace(SHAPE, num_rows=200)
    pool.put(key_of(number), replace(INFO, shape=shape), memoryview(bytes(shape.payload_bytes)))


def identity(key: str, generation: int) -> BlockIdentity:
    return BlockIdentity(key=bytes.fromhex(key), epoch=EPOCH, generation=generation)


def read(pool: EmbeddingPool, lease: Lease) -> bytes:
    """The rows that a reader with `lease` sees, checked as a reader does."""
    with pool.open_block(lease.lease_id) as block:
        return bytes(read_block(block, identity(lease.key, lease.generation), SHAPE))


# Publishing


def test_what_was_put_is_read(pool: EmbeddingPool) -> None:
    put(pool, 1)
    lease = pool.grant(key_of(1), "grpc")
    assert (lease.key, lease.transport, lease.info, lease.num_bytes) == (key_of(1), "grpc", INFO, SHAPE.block_bytes)
    assert read(pool, lease) == rows_of(1)


def test_the_block_lies_where_the_lease_says(pool: EmbeddingPool, region: SharedRegion) -> None:
    put(pool, 1, 2)
    lease = pool.grant(key_of(2))
    block = region.view[lease.offset : lease.offset + lease.num_bytes]
    assert read_block(block, identity(key_of(2), lease.generation), SHAPE) == rows_of(2)


def test_an_unknown_key_is_not_found(pool: EmbeddingPool) -> None:
    with pytest.raises(NotFoundError, match=f"no embedding of key {key_of(1)} is in the pool") as caught:
        pool.grant(key_of(1))
    assert caught.value.reason is Reason.NOT_IN_POOL
    assert pool.num_leases == 0


def test_a_failed_write_leaves_nothing(pool: EmbeddingPool) -> None:
    with pytest.raises(AssertionError):
        pool.put(key_of(1), INFO, rows_of(1)[:-1])
    assert pool.store.used_bytes == 0
    with pytest.raises(NotFoundError):
        pool.grant(key_of(1))
    put(pool, 1)


def test_a_second_put_changes_nothing(pool: EmbeddingPool) -> None:
    put(pool, 1)
    first = pool.grant(key_of(1))
    pool.put(key_of(1), INFO, rows_of(99))
    assert pool.grant(key_of(1)).generation == first.generation
    assert read(pool, first) == rows_of(1)


def test_every_life_of_a_key_has_its_generation(pool: EmbeddingPool) -> None:
    put(pool, 1)
    first = pool.grant(key_of(1))
    pool.release(first.lease_id)
    put(pool, 2, 3, 4, 5, 1)
    assert pool.grant(key_of(1)).generation > first.generation


@pytest.mark.parametrize("reuse", ["rewritten", "only freed"])
def test_a_reader_that_comes_too_late_can_tell(pool: EmbeddingPool, region: SharedRegion, reuse: str) -> None:
    """Its lease has ended and its embedding was evicted; it reads all the same."""
    put(pool, *range(NUM_BLOCKS))
    late, _neighbour = pool.grant(key_of(0)), pool.grant(key_of(1))
    pool.release(late.lease_id)
    for number in (2, 3):
        pool.release(pool.grant(key_of(number)).lease_id)
    put_large(pool, 50)  # evicts 0, whose page is too small, then 2 and 3
    if reuse == "rewritten":
        put(pool, 51)
    with pytest.raises(NotFoundError):
        pool.grant(late.key)
    block = region.view[late.offset : late.offset + late.num_bytes]
    with pytest.raises(BlockError):
        read_block(block, identity(late.key, late.generation), SHAPE)


# Writing in place


def test_nothing_is_seen_before_it_is_committed(pool: EmbeddingPool) -> None:
    room = pool.reserve(key_of(1), INFO)
    assert room is not None
    room.rows[:] = rows_of(1)
    assert pool.find(key_of(1)) is None
    room.commit()
    lease = pool.find(key_of(1))
    assert lease is not None
    assert read(pool, lease) == rows_of(1)


def test_what_is_aborted_leaves_nothing(pool: EmbeddingPool) -> None:
    room = pool.reserve(key_of(1), INFO)
    assert room is not None
    room.rows[:] = rows_of(1)
    room.abort()
    assert pool.store.used_bytes == 0
    assert pool.find(key_of(1)) is None
    put(pool, 1)


def test_a_body_that_fails_leaves_nothing(pool: EmbeddingPool) -> None:
    room = pool.reserve(key_of(1), INFO)
    assert room is not None
    with pytest.raises(ConnectionError), room:
        raise ConnectionError
    assert pool.store.used_bytes == 0


def test_what_is_being_written_is_not_evicted(pool: EmbeddingPool) -> None:
    room = pool.reserve(key_of(1), INFO)
    assert room is not None
    with room as rows:
        rows[:] = rows_of(1)
        put(pool, *range(50, 50 + 2 * NUM_BLOCKS))
    assert read(pool, pool.grant(key_of(1))) == rows_of(1)


def test_there_is_no_room_for_what_the_pool_has(pool: EmbeddingPool) -> None:
    put(pool, 1)
    assert pool.reserve(key_of(1), INFO) is None


# Room


def test_the_unleased_make_room_oldest_first(pool: EmbeddingPool) -> None:
    put(pool, *range(NUM_BLOCKS))
    pool.release(pool.grant(key_of(0)).lease_id)
    put(pool, 50)
    pool.grant(key_of(0))
    with pytest.raises(NotFoundError):
        pool.grant(key_of(1))


def test_a_pool_full_of_leases_is_overloaded_until_one_ends(pool: EmbeddingPool) -> None:
    put(pool, *range(NUM_BLOCKS))
    leases = [pool.grant(key_of(number)) for number in range(NUM_BLOCKS)]
    with pytest.raises(OverloadedError, match="full of leased embeddings") as caught:
        put(pool, 50)
    assert caught.value.reason is Reason.POOL_FULL
    assert [read(pool, lease) for lease in leases] == [rows_of(number) for number in range(NUM_BLOCKS)]
    pool.release(leases[2].lease_id)
    put(pool, 50)
    pool.grant(key_of(50))


def test_leases_that_ran_out_make_room_though_nobody_asked(pool: EmbeddingPool, clock: Clock) -> None:
    put(pool, *range(NUM_BLOCKS))
    for number in range(NUM_BLOCKS):
        pool.grant(key_of(number))
    clock.now_s += END_S
    put(pool, 50)
    assert (pool.num_leases, pool.num_expired) == (0, NUM_BLOCKS)


def test_there_is_a_most_of_leases(pool: EmbeddingPool, clock: Clock) -> None:
    put(pool, 1)
    leases = [pool.grant(key_of(1)) for _ in range(NUM_BLOCKS + 2)]
    assert len({lease.lease_id for lease in leases}) == NUM_BLOCKS + 2
    with pytest.raises(OverloadedError, match=f"{NUM_BLOCKS + 2} leases are held already") as caught:
        pool.grant(key_of(1))
    assert caught.value.reason is Reason.TOO_MANY_LEASES
    clock.now_s += END_S
    pool.grant(key_of(1))


# Leases


def test_a_lease_id_is_32_hex_digits(pool: EmbeddingPool) -> None:
    put(pool, 1)
    assert len(bytes.fromhex(pool.grant(key_of(1)).lease_id)) == 16


def test_a_lease_is_released_once(pool: EmbeddingPool) -> None:
    put(pool, 1)
    lease = pool.grant(key_of(1))
    assert pool.release(lease.lease_id) is lease
    assert pool.release(lease.lease_id) is None
    assert pool.release("") is None
    assert pool.store.num_pinned == 0


def test_each_lease_pins(pool: EmbeddingPool) -> None:
    put(pool, 1)
    first, second = pool.grant(key_of(1)), pool.grant(key_of(1))
    pool.release(first.lease_id)
    assert pool.store.num_pinned == 1
    assert read(pool, second) == rows_of(1)


def test_a_lease_pins_for_longer_than_its_holder_counts_on(pool: EmbeddingPool, clock: Clock) -> None:
    put(pool, 1)
    lease = pool.grant(key_of(1))
    clock.now_s += pool.lease_s + LEASE_MARGIN_S / 2
    pool.expire()
    assert pool.store.num_pinned == 1
    assert read(pool, lease) == rows_of(1)


def test_a_lease_ends_by_itself(pool: EmbeddingPool, clock: Clock) -> None:
    put(pool, 1, 2)
    early = pool.grant(key_of(1))
    clock.now_s += 1
    late = pool.grant(key_of(2))
    clock.now_s += END_S - 1
    pool.expire()
    assert pool.release(early.lease_id) is None
    assert pool.release(late.lease_id) is late


def test_a_lease_that_ends_by_itself_is_told_once(region: SharedRegion, clock: Clock) -> None:
    told: list[Lease] = []
    pool = EmbeddingPool(region, epoch=EPOCH, lease_s=LEASE_S, max_leases=6, clock=clock, on_expiry=told.append)
    put(pool, 1)
    ended, released = pool.grant(key_of(1), "grpc"), pool.grant(key_of(1))
    pool.release(released.lease_id)
    clock.now_s += END_S
    for _ in range(2):
        pool.expire()
    assert told == [ended]
    assert (pool.num_granted, pool.num_expired) == (2, 1)


def test_it_knows_how_long_a_lease_is_held(pool: EmbeddingPool, clock: Clock) -> None:
    put(pool, 1)
    lease = pool.grant(key_of(1))
    clock.now_s += 2.5
    assert pool.held_s(lease) == pytest.approx(2.5)


MANY = 10_000


@pytest.fixture
def crowd(region: SharedRegion, clock: Clock) -> EmbeddingPool:
    """A pool in which `MANY` leases, on each embedding it has room for, have ended at once and nobody has noticed."""
    pool = EmbeddingPool(region, epoch=EPOCH, lease_s=LEASE_S, max_leases=MANY, clock=clock)
    put(pool, *range(NUM_BLOCKS))
    for number in range(MANY):
        pool.grant(key_of(number % NUM_BLOCKS))
    clock.now_s += END_S
    return pool


def test_leases_that_end_together_stop_nobody_for_long(crowd: EmbeddingPool) -> None:
    """Each call ends some; nothing that is asked meanwhile waits for all of them."""
    ended: list[int] = []
    while crowd.expire():
        ended.append(crowd.num_expired - sum(ended))
    assert 0 < max(ended) <= 256
    assert (crowd.num_leases, crowd.num_expired, crowd.store.num_pinned) == (0, MANY, 0)


def test_who_needs_the_room_of_ended_leases_gets_it(crowd: EmbeddingPool) -> None:
    put(crowd, 50)
    assert read(crowd, crowd.grant(key_of(50))) == rows_of(50)


def test_who_needs_one_of_the_leases_that_have_ended_gets_it(crowd: EmbeddingPool) -> None:
    assert crowd.grant(key_of(0)).key == key_of(0)
    assert crowd.num_leases > MANY // 2


def test_a_lease_that_has_ended_opens_nothing_before_that_was_noticed(region: SharedRegion, clock: Clock) -> None:
    pool = EmbeddingPool(region, epoch=EPOCH, lease_s=LEASE_S, max_leases=MANY, clock=clock)
    put(pool, 1)
    last = [pool.grant(key_of(1)) for _ in range(MANY)][-1]
    clock.now_s += END_S
    with pytest.raises(NotFoundError, match="has ended"):
        read(pool, last)
    assert pool.num_leases > 0


# Replacing a lease


def test_a_lease_is_replaced_in_one_step(pool: EmbeddingPool) -> None:
    put(pool, 1)
    old = pool.grant(key_of(1))
    new = pool.grant(key_of(1), "grpc", replaces=old.lease_id)
    assert (pool.num_leases, pool.store.num_pinned) == (1, 1)
    assert pool.release(old.lease_id) is None
    assert read(pool, new) == rows_of(1)
    pool.release(new.lease_id)
    assert pool.store.num_pinned == 0


def test_the_last_lease_can_be_replaced(pool: EmbeddingPool) -> None:
    put(pool, 1)
    leases = [pool.grant(key_of(1)) for _ in range(NUM_BLOCKS + 2)]
    pool.grant(key_of(1), replaces=leases[0].lease_id)
    with pytest.raises(OverloadedError):
        pool.grant(key_of(1), replaces=leases[0].lease_id)  # it has ended


def test_a_lease_on_another_embedding_is_not_replaced(pool: EmbeddingPool) -> None:
    put(pool, 1, 2)
    other = pool.grant(key_of(2))
    pool.grant(key_of(1), replaces=other.lease_id)
    assert pool.release(other.lease_id) is other


# Reading


def test_an_ended_lease_opens_nothing(pool: EmbeddingPool, clock: Clock) -> None:
    put(pool, 1)
    lease = pool.grant(key_of(1))
    clock.now_s += END_S
    with pytest.raises(NotFoundError, match=f"lease {lease.lease_id} does not exist or has ended") as caught:
        read(pool, lease)
    assert caught.value.reason is Reason.LEASE_ENDED


def test_an_open_block_cannot_be_written(pool: EmbeddingPool) -> None:
    put(pool, 1)
    with pool.open_block(pool.grant(key_of(1)).lease_id) as block, pytest.raises(TypeError, match="read-only"):
        block[0] = 1


@pytest.mark.parametrize("end", ["release", "expiry"])
def test_an_open_block_outlives_its_lease(pool: EmbeddingPool, clock: Clock, end: str) -> None:
    put(pool, *range(NUM_BLOCKS))
    lease = pool.grant(key_of(0))
    with pool.open_block(lease.lease_id) as block:
        before = bytes(block)
        if end == "release":
            pool.release(lease.lease_id)
        else:
            clock.now_s += END_S
            pool.expire()
        put(pool, *range(50, 50 + NUM_BLOCKS))
        assert bytes(block) == before
    assert pool.store.num_pinned == 0


def test_a_reader_that_fails_unpins(pool: EmbeddingPool) -> None:
    put(pool, 1)
    lease = pool.grant(key_of(1))
    with contextlib.suppress(ConnectionError), pool.open_block(lease.lease_id):
        pool.release(lease.lease_id)
        raise ConnectionError
    assert pool.store.num_pinned == 0


def test_readers_and_a_writer_at_once(pool: EmbeddingPool) -> None:
    """Three threads read whatever the fourth publishes, until enough was read."""
    is_done = threading.Event()
    num_reads = itertools.count()
    torn: list[BaseException] = []

    def read_all() -> None:
        try:
            while not is_done.is_set():
                for number in range(2 * NUM_BLOCKS):
                    try:
                        lease = pool.grant(key_of(number))
                    except ServiceError:
                        continue
                    assert read(pool, lease) == rows_of(number)
                    assert pool.release(lease.lease_id) is lease
                    next(num_reads)
        except BaseException as error:
            torn.append(error)

    readers = [threading.Thread(target=read_all) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(100_000):
        with contextlib.suppress(OverloadedError):
            put(pool, turn % (2 * NUM_BLOCKS))
        if turn % 100 == 0 and (torn or next(num_reads) > 2000):
            break
    is_done.set()
    for reader in readers:
        reader.join()
    assert torn == []
    assert next(num_reads) > 2000
    assert (pool.num_leases, pool.store.num_pinned) == (0, 0)


class PoolMachine(RuleBasedStateMachine):
    """Whatever happens, a lease that has not ended reads what it was granted for, and an ended one nothing."""

    leases = Bundle("leases")
    numbers = st.integers(0, 2 * NUM_BLOCKS)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.region = SharedRegion.create("ec-producer-test", NUM_BLOCKS * 4096)
        self.pool = EmbeddingPool(self.region, epoch=EPOCH, lease_s=LEASE_S, max_leases=6, clock=self.clock)
        self.live: dict[str, tuple[Lease, bytes]] = {}
        self.turn = 0

    @rule(number=numbers)
    def put(self, number: int) -> None:
        self.turn += 1  # equal keys have equal bytes in truth; here other ones, so that a rewrite would show
        try:
            self.pool.put(key_of(number), INFO, rows_of(self.turn))
        except OverloadedError:
            self.end_leases()
            assert len({lease.key for lease, _ in self.live.values()}) == NUM_BLOCKS

    @rule(target=leases, number=numbers)
    def grant(self, number: int) -> object:
        try:
            lease = self.pool.grant(key_of(number))
        except NotFoundError:
            self.end_leases()
            assert key_of(number) not in {lease.key for lease, _ in self.live.values()}
            return multiple()
        except OverloadedError:
            self.end_leases()
            assert len(self.live) == 6
            return multiple()
        self.live[lease.lease_id] = (lease, read(self.pool, lease))
        return lease

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        ended = self.pool.release(lease.lease_id)
        known = self.live.pop(lease.lease_id, None)
        assert ended is None or ended is lease
        assert known is None or ended is lease or lease.expires_at_s <= self.clock.now_s

    @rule(target=leases, lease=consumes(leases))
    def replace(self, lease: Lease) -> object:
        self.end_leases()
        _, rows = self.live.pop(lease.lease_id, (None, None))
        if rows is None:
            return multiple()
        new = self.pool.grant(lease.key, replaces=lease.lease_id)
        self.live[new.lease_id] = (new, rows)
        return new

    @rule(seconds=st.sampled_from([1.0, LEASE_S, END_S]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(lease=leases)
    def open(self, lease: Lease) -> None:
        self.end_leases()
        if lease.lease_id in self.live:
            assert read(self.pool, lease) == self.live[lease.lease_id][1]
        else:
            with pytest.raises(NotFoundError):
                read(self.pool, lease)

    @invariant()
    def counts_are_right(self) -> None:
        self.end_leases()
        self.pool.expire()
        assert self.pool.num_leases == len(self.live)
        assert self.pool.store.num_pinned == len({lease.key for lease, _ in self.live.values()})

    def end_leases(self) -> None:
        self.live = {name: held for name, held in self.live.items() if held[0].expires_at_s > self.clock.now_s}

    def teardown(self) -> None:
        self.region.close()


TestPoolAgainstAModel = PoolMachine.TestCase
