"""Which requests wait for which embeddings: pins, shared pulls, failures, and what never may happen in between."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from consumer_shim.pairing import RequestItem
from consumer_shim.pull import Failure, Pull, PullState
from consumer_shim.scheduler import Load, SchedulerSide
from consumer_shim.tickets import PullTicket
from producer.memory.arena import PAGE_BYTES
from producer.memory.block_store import Block, BlockState, BlockStore, StoreFullError
from producer.wire.block import HEADER_BYTES

WIDTH, DTYPE, ADDRESS = 8, "float32", "producer:1"
TIMEOUT_S = 20.0
GONE = Failure(503, "it has gone")


def ticket(number: int, **changes: object) -> PullTicket:
    """The ticket of image `number`: 4 rows, one page."""
    fields = {"num_rows": 4, "width": WIDTH, "dtype": DTYPE, "address": ADDRESS, "modality": "image"}
    fields |= {"key": f"{number:064x}", "lease_id": f"{number:032x}", "epoch": "0" * 16}
    return PullTicket(**(fields | changes))  # type: ignore[arg-type]


def item(number: int, end: int = 10, **changes: object) -> RequestItem:
    """Image `number`, of which the prompt needs nothing behind position `end`."""
    fields = {"identifier": f"{number:064x}", "modality": "image", "end": end, "num_rows": 4, "is_in_band": False}
    return RequestItem(**(fields | changes))  # type: ignore[arg-type]


Media = tuple[Sequence[RequestItem], Sequence[PullTicket]]


def images(*numbers: int) -> Media:
    """A request's images in prompt order, ten positions each."""
    return [item(number, end=10 * place) for place, number in enumerate(numbers, 1)], list(map(ticket, numbers))


class Engine:
    """A `SchedulerSide` over a real store, asked as vLLM's scheduler does; pulls end when a test says so."""

    def __init__(self, num_pages: int = 16, on_free: Callable[[Block], None] = lambda block: None) -> None:
        self.now_s = 0.0
        self.pulls: list[Pull] = []
        self.meanwhile: Callable[[], object] = lambda: None
        """What other threads do within a scheduling pass."""
        self.store = BlockStore(num_pages * PAGE_BYTES, on_free)
        self.side = SchedulerSide(
            self.store,
            self.pulls.append,
            addresses=[ADDRESS],
            width=lambda modality: WIDTH,
            dtype=DTYPE,
            pull_timeout_s=TIMEOUT_S,
            clock=self.clock,
        )

    def clock(self) -> float:
        self.meanwhile()
        return self.now_s

    def is_ready(self, name: str, media: Media, computed: int = 0) -> bool:
        return self.side.is_ready(name, computed, lambda: media)

    def arrive(self, pull: Pull) -> None:
        """What a puller does for an embedding that came."""
        for state in (PullState.ACQUIRING, PullState.READING, PullState.CHECKING):
            pull.move(state)
        self.store.commit(pull.block, pull.ticket.shape)
        pull.move(PullState.READY)

    def lose(self, pull: Pull, failure: Failure = GONE) -> None:
        """What a puller does for one that did not."""
        self.store.free(pull.block)
        pull.fail(failure)

    def make_ready(self, name: str, media: Media) -> None:
        """A request whose embeddings have all arrived and are pinned."""
        if not self.is_ready(name, media):
            for pull in self.pulls:
                if not pull.is_over:
                    self.arrive(pull)
            assert self.is_ready(name, media)

    def evict_all(self) -> None:
        """Others need all the room that is not pinned."""
        blocks: list[Block] = []
        with suppress(StoreFullError):
            while True:
                blocks.append(self.store.reserve(f"others' {len(blocks)}", 1))  # one page
        for block in blocks:
            self.store.free(block)


@pytest.fixture
def engine() -> Engine:
    return Engine()


# Waiting


def test_ready_only_once_pinned(engine: Engine) -> None:
    assert not engine.is_ready("r", images(1))
    (pull,) = engine.pulls
    assert not engine.side.has(item(1).identifier)
    engine.arrive(pull)
    assert not engine.side.has(item(1).identifier)
    assert engine.is_ready("r", images(1))
    assert engine.side.has(item(1).identifier)
    assert pull.block.pins == 1


def test_waiting_starts_each_pull_once(engine: Engine) -> None:
    for _ in range(3):
        assert not engine.is_ready("r", images(1, 2))
    assert [pull.ticket for pull in engine.pulls] == [ticket(1), ticket(2)]
    assert {pull.deadline_s for pull in engine.pulls} == {TIMEOUT_S}
    engine.arrive(engine.pulls[0])
    assert not engine.is_ready("r", images(1, 2))
    engine.arrive(engine.pulls[1])
    assert engine.is_ready("r", images(1, 2))
    assert len(engine.pulls) == 2


def test_two_requests_share_a_pull(engine: Engine) -> None:
    assert not engine.is_ready("a", images(1))
    assert not engine.is_ready("b", images(1))
    (pull,) = engine.pulls
    engine.arrive(pull)
    assert engine.is_ready("a", images(1))
    assert engine.is_ready("b", images(1))
    assert pull.block.pins == 2


def test_what_is_there_is_not_pulled_again(engine: Engine) -> None:
    engine.make_ready("a", images(1))
    engine.side.finish("a")
    assert engine.is_ready("b", images(1))
    assert len(engine.pulls) == 1


def test_the_same_image_twice_in_a_request(engine: Engine) -> None:
    assert not engine.is_ready("r", images(1, 1))
    (pull,) = engine.pulls
    engine.arrive(pull)
    assert engine.is_ready("r", images(1, 1))
    assert engine.is_ready("r", images(1, 1), computed=10)  # the second is still needed
    assert pull.block.pins == 1
    assert engine.is_ready("r", images(1, 1), computed=20)
    assert pull.block.pins == 0


def test_in_band_items_are_left_alone(engine: Engine) -> None:
    media = [item(1, is_in_band=True), item(2, end=20)], [ticket(2)]
    engine.make_ready("r", media)
    assert [pull.ticket for pull in engine.pulls] == [ticket(2)]
    assert not engine.side.has(item(1).identifier)
    engine.side.load(item(1).identifier)
    assert engine.side.take_loads([]) == []


def test_a_request_with_only_in_band_items_is_ready_at_once(engine: Engine) -> None:
    assert engine.is_ready("r", ([item(1, is_in_band=True)], []))
    assert engine.pulls == []


# What stands in for what


def stand_ins(*numbers: int, modality: str = "image") -> Media:
    """As `images`, each with a tensor of its own that the prompt is made of: a blank image, or zeros."""
    items, tickets = images(*numbers)
    return (
        [replace(item, modality=modality, is_in_band=True) for item in items],
        [replace(ticket, modality=modality) for ticket in tickets],
    )


def test_with_as_many_tickets_as_items_tensors_only_stand_in(engine: Engine) -> None:
    items, tickets = stand_ins(1, 2)
    assert not engine.is_ready("r", (items, tickets))
    assert [pull.ticket for pull in engine.pulls] == tickets
    for pull in engine.pulls:
        engine.arrive(pull)
    assert engine.is_ready("r", (items, tickets))
    assert [engine.side.has(item.identifier) for item in items] == [True, True]
    for one in items:
        engine.side.load(one.identifier)
    assert [load.identifier for load in engine.side.take_loads([])] == [one.identifier for one in items]


def test_some_tensors_may_stand_in_and_others_be_left_out(engine: Engine) -> None:
    items, tickets = images(1, 2, 3)
    items = [items[0], replace(items[1], is_in_band=True), items[2]]
    engine.make_ready("r", (items, tickets))
    assert [pull.ticket for pull in engine.pulls] == tickets
    assert all(engine.side.has(one.identifier) for one in items)


def test_the_same_stand_in_twice(engine: Engine) -> None:
    items, tickets = stand_ins(1, 1)
    engine.make_ready("r", (items, tickets))
    assert [pull.ticket for pull in engine.pulls] == [tickets[0]]


def test_tensors_without_a_ticket_are_the_engines(engine: Engine) -> None:
    """Its own encoder computes them, or they are embeddings already."""
    items, _ = stand_ins(1, 2)
    assert engine.is_ready("r", (items, []))
    assert engine.pulls == []
    assert not any(engine.side.has(one.identifier) for one in items)


def test_among_others_a_tensor_needs_no_ticket(engine: Engine) -> None:
    """Fewer tickets than items: then they are for those that bring no tensor, wherever these stand."""
    items, tickets = images(1, 2, 3, 4)
    items = [replace(one, is_in_band=place in (0, 2)) for place, one in enumerate(items)]
    engine.make_ready("r", (items, [tickets[1], tickets[3]]))
    assert [pull.ticket for pull in engine.pulls] == [tickets[1], tickets[3]]
    assert [engine.side.has(one.identifier) for one in items] == [False, True, False, True]


def test_each_modality_is_counted_by_itself(engine: Engine) -> None:
    """Stand-ins for both videos, tensors of the client's own for two of three images."""
    videos, video_tickets = stand_ins(1, 2, modality="video")
    own, _ = stand_ins(3, 4)
    left, left_tickets = images(5)
    items = [own[0], videos[0], left[0], videos[1], own[1]]
    tickets = [video_tickets[0], left_tickets[0], video_tickets[1]]
    engine.make_ready("r", (items, tickets))
    assert sorted(pull.ticket.key for pull in engine.pulls) == [one.key for one in (*video_tickets, *left_tickets)]
    assert [engine.side.has(one.identifier) for one in items] == [False, True, True, True, False]


def test_tickets_go_to_items_in_the_order_of_the_prompt(engine: Engine) -> None:
    """Within a modality; tickets of several may come in any order."""
    images_, image_tickets = stand_ins(1, 2)
    videos, video_tickets = stand_ins(3, modality="video")
    engine.make_ready("r", ([images_[0], videos[0], images_[1]], [*video_tickets, *image_tickets]))
    for one in (*images_, *videos):
        engine.side.load(one.identifier)
    offsets = {pull.ticket.key: pull.block.offset + HEADER_BYTES for pull in engine.pulls}
    loads = {load.identifier: load.offset for load in engine.side.take_loads([])}
    assert loads == offsets  # identifiers are keys here


def test_it_is_described_once(engine: Engine) -> None:
    described: list[Media] = []

    def describe() -> Media:
        described.append(images(1))
        return described[-1]

    for _ in range(3):
        engine.side.is_ready("r", 0, describe)
    assert len(described) == 1


# Failure


def test_a_lost_pull_fails_those_that_waited_for_it(engine: Engine) -> None:
    requests = {"a": images(1), "b": images(1, 2), "c": images(2)}
    assert not any(engine.is_ready(name, media) for name, media in requests.items())
    first, second = engine.pulls
    engine.lose(first)
    engine.arrive(second)
    assert [name for name, media in requests.items() if engine.is_ready(name, media)] == ["c"]
    assert engine.side.take_unavailable() == {"a", "b"}
    assert engine.side.failure_of(ticket(1).lease_id) == GONE


def test_a_failure_is_told_once(engine: Engine) -> None:
    assert not engine.is_ready("r", images(1))
    engine.lose(engine.pulls[0])
    assert not engine.is_ready("r", images(1))
    assert engine.side.take_unavailable() == {"r"}
    assert not engine.is_ready("r", images(1))
    assert engine.side.take_unavailable() == set()
    assert len(engine.pulls) == 1


def test_after_a_failure_a_new_request_pulls_anew(engine: Engine) -> None:
    assert not engine.is_ready("a", images(1))
    engine.lose(engine.pulls[0])
    assert not engine.is_ready("late", images(1))
    assert not engine.is_ready("a", images(1))
    assert len(engine.pulls) == 2
    engine.arrive(engine.pulls[1])
    assert engine.is_ready("late", images(1))
    assert engine.side.take_unavailable() == {"a"}


REFUSED = [
    ((item(1),), (ticket(1, num_rows=5),), "the ticket of image 0000000000000000 has rows 5, expected 4"),
    ((item(1),), (ticket(1, width=16),), "has elements a row 16, expected 8"),
    ((item(1),), (ticket(1, dtype="float16"),), "has elements of float16, expected float32"),
    (
        (item(1),),
        (ticket(1, address="evil:1"),),
        "the ticket names producer evil:1, which this server is not configured with",
    ),
    ((item(1), item(2)), (ticket(1),), "image 0000000000000000 brings neither an embedding nor a ticket for one"),
    ((item(1),), (ticket(1), ticket(2)), "the request has more tickets than media"),
    ((item(1),), (ticket(1, modality="video"),), "image 0000000000000000 brings neither"),
    ((item(1, is_in_band=True), item(2, is_in_band=True)), (ticket(1),), "more tickets than media"),
    ((item(1, is_in_band=True),), (ticket(1), ticket(2)), "more tickets than media"),
    ((item(1, is_in_band=True),), (ticket(1, modality="video"),), "more tickets than media"),
    ((item(1, is_in_band=True),), (ticket(1, num_rows=5),), "has rows 5, expected 4"),
    ((item(1, is_in_band=True), item(2)), (ticket(1), ticket(2, width=16)), "has elements a row 16, expected 8"),
]


@pytest.mark.parametrize(("items", "tickets", "sentence"), REFUSED)
def test_what_does_not_fit_fails_its_request_alone(
    engine: Engine, items: Sequence[RequestItem], tickets: Sequence[PullTicket], sentence: str
) -> None:
    assert not engine.is_ready("other", images(7))
    assert not engine.is_ready("r", (items, tickets))
    assert engine.side.take_unavailable() == {"r"}
    failure = engine.side.failure_of(tickets[0].lease_id)
    assert failure is not None
    assert failure.http_status == 400
    assert sentence in failure.message
    engine.side.finish("r")
    engine.arrive(engine.pulls[0])
    assert engine.is_ready("other", images(7))
    assert len(engine.pulls) == 1


def test_malformed_tickets_fail_their_request_alone(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def describe() -> Media:
        raise ValueError("the ticket's key is 'x'")

    assert not engine.side.is_ready("r", 0, describe)
    assert engine.side.take_unavailable() == {"r"}
    assert "request r fails: the ticket's key is 'x'" in caplog.messages
    engine.side.finish("r")
    engine.make_ready("other", images(1))


def test_an_identifier_means_one_content_while_it_is_in_use(engine: Engine) -> None:
    other = [item(1)], [ticket(2)]
    engine.make_ready("a", images(1))
    assert not engine.is_ready("b", other)
    assert engine.side.failure_of(ticket(2).lease_id) is not None
    engine.side.finish("b")
    engine.side.finish("a")
    assert not engine.is_ready("c", other)
    assert engine.side.take_unavailable() == {"b"}
    engine.arrive(engine.pulls[-1])
    assert engine.is_ready("c", other)


def test_an_identifier_in_the_engines_cache_is_in_use(engine: Engine) -> None:
    other = [item(1)], [ticket(2)]
    engine.make_ready("a", images(1))
    engine.side.load(item(1).identifier)
    engine.side.finish("a")
    assert not engine.is_ready("b", other)
    assert engine.side.take_unavailable() == {"b"}
    engine.side.finish("b")
    engine.side.take_loads([item(1).identifier])
    assert not engine.is_ready("c", other)
    assert engine.side.take_unavailable() == set()


def test_failures_are_kept_for_the_latest_only(engine: Engine) -> None:
    for number in range(1100):
        assert not engine.is_ready(str(number), ([item(number)], [ticket(number, num_rows=5)]))
        engine.side.finish(str(number))
    assert engine.side.failure_of(ticket(0).lease_id) is None
    assert engine.side.failure_of(ticket(1099).lease_id) is not None


# Tickets that were left


def bare(*numbers: int) -> Media:
    """As `images`, without tickets: what vLLM makes of a request for beam search."""
    return images(*numbers)[0], []


def test_a_left_ticket_serves_a_request_that_brings_none(engine: Engine) -> None:
    engine.side.leave_tickets([ticket(1), ticket(2)])
    assert not engine.is_ready("r", bare(1, 2))
    assert [pull.ticket for pull in engine.pulls] == [ticket(1), ticket(2)]
    for pull in engine.pulls:
        engine.arrive(pull)
    assert engine.is_ready("r", bare(1, 2))
    for number in (1, 2):
        engine.side.load(item(number).identifier)
    assert [load.identifier for load in engine.side.take_loads([])] == [item(1).identifier, item(2).identifier]


def test_it_serves_as_many_requests_as_come(engine: Engine) -> None:
    """One after the other and at once, whether its embedding is still there or not."""
    engine.side.leave_tickets([ticket(1)])
    for name in ("a", "b"):
        engine.make_ready(name, bare(1))
    engine.side.finish("a")
    engine.side.finish("b")
    assert len(engine.pulls) == 1
    engine.evict_all()
    engine.make_ready("c", bare(1))
    assert len(engine.pulls) == 2


@pytest.mark.parametrize("is_in_band", [True, False])
def test_it_serves_the_same_image_twice(engine: Engine, is_in_band: bool) -> None:
    """A stand-in may be a tensor, too: a blank image."""
    engine.side.leave_tickets([ticket(1)])
    items = [replace(one, is_in_band=is_in_band) for one in bare(1, 1)[0]]
    engine.make_ready("r", (items, []))
    assert [pull.ticket for pull in engine.pulls] == [ticket(1)]
    assert engine.side.has(item(1).identifier)


def test_a_request_with_tickets_of_its_own_does_not_look_there(engine: Engine) -> None:
    own = ticket(1, lease_id="f")
    engine.side.leave_tickets([ticket(1), ticket(2)])
    assert not engine.is_ready("r", ([item(1)], [own]))
    assert [pull.ticket for pull in engine.pulls] == [own]
    assert not engine.is_ready("too few", ([item(1), item(2, end=20)], [own]))
    assert engine.side.take_unavailable() == {"too few"}
    failure = engine.side.failure_of("f")
    assert failure is not None
    assert "brings neither an embedding nor a ticket" in failure.message


def test_items_that_go_by_no_left_ticket(engine: Engine) -> None:
    """Those that bring their own tensor are the engine's; others fail."""
    engine.side.leave_tickets([ticket(1)])
    assert engine.is_ready("tensor", ([item(2, is_in_band=True)], []))
    assert not engine.is_ready("nothing", bare(3))
    assert not engine.is_ready("one of two", bare(1, 3))
    assert engine.side.take_unavailable() == {"nothing", "one of two"}
    assert engine.pulls == []


def test_a_left_ticket_that_does_not_fit(engine: Engine) -> None:
    engine.side.leave_tickets([ticket(1, num_rows=5)])
    assert not engine.is_ready("r", bare(1))
    assert engine.side.take_unavailable() == {"r"}
    failure = engine.side.failure_of(ticket(1).lease_id)
    assert failure is not None
    assert (failure.http_status, "has rows 5, expected 4" in failure.message) == (400, True)


def test_a_left_tickets_pull_that_fails_is_explained(engine: Engine) -> None:
    engine.side.leave_tickets([ticket(1)])
    assert not engine.is_ready("r", bare(1))
    engine.lose(engine.pulls[0])
    assert not engine.is_ready("r", bare(1))
    assert engine.side.failure_of(ticket(1).lease_id) == GONE


def test_the_latest_ticket_of_a_key_counts(engine: Engine) -> None:
    engine.side.leave_tickets([ticket(1, epoch="1" * 16), ticket(1, epoch="2" * 16)])
    engine.side.leave_tickets([ticket(1, epoch="3" * 16)])
    assert not engine.is_ready("r", bare(1))
    assert [pull.ticket.epoch for pull in engine.pulls] == ["3" * 16]


MOST_LEFT = 4096


def is_left(engine: Engine, number: int) -> bool:
    """Whether a request of this image alone is served."""
    name = f"of {number}"
    engine.is_ready(name, bare(number))
    engine.side.finish(name)
    return name not in engine.side.take_unavailable()


@pytest.mark.parametrize("at_once", [True, False])
def test_the_oldest_left_tickets_go(at_once: bool) -> None:
    engine = Engine(num_pages=64)
    tickets = [ticket(number) for number in range(MOST_LEFT)]
    for some in [tickets] if at_once else [[one] for one in tickets]:
        engine.side.leave_tickets(some)
    assert is_left(engine, 0)
    engine.side.leave_tickets([ticket(MOST_LEFT)])
    assert [is_left(engine, number) for number in (0, 1, MOST_LEFT)] == [False, True, True]


def test_a_ticket_that_is_left_again_is_none_of_the_oldest() -> None:
    engine = Engine(num_pages=64)
    engine.side.leave_tickets([ticket(number) for number in range(MOST_LEFT)])
    engine.side.leave_tickets([ticket(0)])
    engine.side.leave_tickets([ticket(MOST_LEFT)])
    assert [is_left(engine, number) for number in (0, 1, 2)] == [True, False, True]


class Watched(list[RequestItem]):
    """Items of a request; something happens as they are first looked through, behind the first of them."""

    meanwhile: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[RequestItem]:
        for one in super().__iter__():
            yield one
            if self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                meanwhile()


def test_another_thread_may_leave_tickets(engine: Engine) -> None:
    """A request has all of those that it found, although others push them out meanwhile."""
    others = [ticket(number) for number in range(10, 10 + MOST_LEFT)]
    leaving = threading.Thread(target=engine.side.leave_tickets, args=(others,))

    def meanwhile() -> None:
        leaving.start()
        leaving.join(0.2)  # without a lock it would be done by then

    engine.side.leave_tickets([ticket(1), ticket(2)])
    items = Watched(bare(1, 2)[0])
    items.meanwhile = meanwhile
    assert not engine.is_ready("r", (items, []))
    leaving.join()
    assert engine.side.take_unavailable() == set()
    assert [pull.ticket for pull in engine.pulls] == [ticket(1), ticket(2)]
    assert not is_left(engine, 1)


# Room


def test_a_full_region_is_waited_for(engine: Engine) -> None:
    engine = Engine(num_pages=2)
    engine.make_ready("a", images(1))
    assert not engine.is_ready("b", images(2, 3))  # one page is free: half of it is not begun
    assert len(engine.pulls) == 1
    engine.side.finish("a")
    engine.make_ready("b", images(2, 3))
    assert engine.store.num_evictions == 1


def test_a_full_region_is_waited_for_until_the_deadline() -> None:
    engine = Engine(num_pages=1)
    engine.make_ready("a", images(1))
    engine.now_s = 100.0
    assert not engine.is_ready("b", images(2))
    engine.now_s = 100.0 + TIMEOUT_S
    assert not engine.is_ready("b", images(2))
    assert engine.side.take_unavailable() == set()
    engine.now_s += 0.1
    assert not engine.is_ready("b", images(2))
    assert engine.side.take_unavailable() == {"b"}
    assert engine.side.failure_of(ticket(2).lease_id) == Failure(504, "the embeddings did not arrive within 20 s")
    assert engine.is_ready("a", images(1))


def test_the_deadline_counts_from_the_latest_wait(engine: Engine) -> None:
    """A request that was ready for long, and lost its place, has its time again."""
    engine.make_ready("r", images(1, 2))
    assert engine.is_ready("r", images(1, 2), computed=10)
    engine.evict_all()
    engine.now_s = 10 * TIMEOUT_S
    assert not engine.is_ready("r", images(1, 2), computed=0)  # preempted: it begins anew
    assert engine.side.take_unavailable() == set()
    assert engine.pulls[-1].deadline_s == 11 * TIMEOUT_S


def test_eviction_between_two_passes_leads_to_a_new_pull(engine: Engine) -> None:
    assert not engine.is_ready("r", images(1))
    engine.arrive(engine.pulls[0])
    engine.evict_all()
    assert not engine.is_ready("r", images(1))
    assert len(engine.pulls) == 2
    engine.arrive(engine.pulls[1])
    assert engine.is_ready("r", images(1))


# Pins


def test_pins_go_as_the_prompt_is_computed(engine: Engine) -> None:
    engine.make_ready("r", images(1, 2))
    first, second = (pull.block for pull in engine.pulls)
    for computed, pins in {9: (1, 1), 10: (0, 1), 19: (0, 1), 20: (0, 0)}.items():
        assert engine.is_ready("r", images(1, 2), computed)
        assert (first.pins, second.pins) == pins


def test_finishing_unpins(engine: Engine) -> None:
    engine.make_ready("r", images(1, 2))
    engine.side.finish("r")
    assert engine.store.num_pinned == 0
    engine.side.finish("r")


def test_failing_unpins(engine: Engine) -> None:
    assert not engine.is_ready("r", images(1, 2))
    engine.arrive(engine.pulls[0])
    assert not engine.is_ready("r", images(1, 2))
    assert engine.pulls[0].block.pins == 1
    engine.lose(engine.pulls[1])
    assert not engine.is_ready("r", images(1, 2))
    assert engine.store.num_pinned == 0


def test_finishing_while_waiting_lets_the_pull_end(engine: Engine) -> None:
    assert not engine.is_ready("r", images(1))
    engine.side.finish("r")
    engine.arrive(engine.pulls[0])
    assert engine.store.num_pinned == 0
    assert engine.is_ready("later", images(1))


def test_a_load_is_pinned_until_it_was_done(engine: Engine) -> None:
    engine.make_ready("r", images(1))
    engine.side.load(item(1).identifier)
    block = engine.pulls[0].block
    (load,) = engine.side.take_loads([])
    assert (load.identifier, load.offset, load.shape) == (
        item(1).identifier,
        block.offset + HEADER_BYTES,
        ticket(1).shape,
    )
    engine.side.finish("r")
    engine.evict_all()
    assert block.state is BlockState.READY
    engine.side.loaded([load.load_id])
    engine.evict_all()
    assert block.state is BlockState.FREED


def test_loads_are_handed_out_once(engine: Engine) -> None:
    engine.make_ready("r", images(1, 2))
    engine.side.load(item(1).identifier)
    engine.side.load(item(2).identifier)
    loads = engine.side.take_loads([])
    assert [load.identifier for load in loads] == [item(1).identifier, item(2).identifier]
    assert len({load.load_id for load in loads}) == 2
    assert engine.side.take_loads([]) == []


def test_unknown_identifiers_may_be_freed(engine: Engine) -> None:
    """Those of in-band items, which the engine's cache holds, too."""
    assert engine.side.take_loads(["somebody's"]) == []


# Races and forgeries


@pytest.mark.parametrize("num_passes", [0, 1])
def test_an_embedding_may_arrive_within_a_pass(engine: Engine, num_passes: int) -> None:
    """The puller's thread commits it after the scheduler found it missing."""

    assert not engine.is_ready("first", images(1))
    for _ in range(num_passes):
        assert not engine.is_ready("r", images(1))
    engine.meanwhile = lambda: [engine.arrive(pull) for pull in engine.pulls if not pull.is_over]
    engine.is_ready("r", images(1))
    assert engine.is_ready("r", images(1))


@pytest.mark.parametrize("num_rows", [2, 8])
@pytest.mark.parametrize("has_arrived", [True, False])
def test_a_forged_shape_gets_nothing(engine: Engine, num_rows: int, has_arrived: bool) -> None:
    """A client can send a ticket of its own making, for an embedding that is there or on its way for another."""
    forged = [item(9, num_rows=num_rows)], [ticket(1, num_rows=num_rows, lease_id="f")]
    assert not engine.is_ready("honest", images(1))
    if not has_arrived:
        assert not engine.is_ready("forger", forged)
    engine.arrive(engine.pulls[0])
    assert not engine.is_ready("forger", forged)
    assert engine.side.take_unavailable() == {"forger"}
    assert engine.is_ready("honest", images(1))


def test_an_in_band_item_under_an_identifier_in_use(engine: Engine) -> None:
    """A client chooses the identifier of its own tensor; the engine would take the region's embedding for it."""
    engine.make_ready("a", images(1))
    assert not engine.is_ready("b", ([item(1, is_in_band=True)], []))
    assert engine.side.take_unavailable() == {"b"}


def test_an_in_band_item_is_taken_for_no_embedding(engine: Engine) -> None:
    """Nor may a tensor that a client brought answer for an image, while the engine keeps it."""
    assert engine.is_ready("a", ([item(1, is_in_band=True)], []))
    engine.side.load(item(1).identifier)
    engine.side.finish("a")
    assert not engine.is_ready("b", images(1))
    assert engine.side.take_unavailable() == {"b"}
    engine.side.take_loads([item(1).identifier])
    assert not engine.is_ready("c", images(1))
    assert engine.side.take_unavailable() == set()


def test_an_embedding_larger_than_the_region_is_refused_at_once(engine: Engine) -> None:
    rows = 1 << 20
    assert not engine.is_ready("r", ([item(1, num_rows=rows)], [ticket(1, num_rows=rows)]))
    assert engine.side.take_unavailable() == {"r"}


def test_a_forged_shape_fails_nobody_else(engine: Engine) -> None:
    """The producer's block is not of the forger's size, but of the other's."""
    forged = [item(9, num_rows=8)], [ticket(1, num_rows=8, lease_id="f")]
    assert not engine.is_ready("forger", forged)
    assert not engine.is_ready("honest", images(1))
    engine.lose(engine.pulls[0], Failure(502, "the block has 320 bytes, expected 448"))
    assert not engine.is_ready("forger", forged)
    assert not engine.is_ready("honest", images(1))
    assert engine.side.take_unavailable() == {"forger"}
    engine.arrive(engine.pulls[-1])
    assert engine.is_ready("honest", images(1))


def test_anothers_stale_ticket_fails_its_own_request_only(engine: Engine) -> None:
    """After a restart of the producer, old and new tickets of one image meet."""
    assert not engine.is_ready("old", ([item(1)], [ticket(1, epoch="1" * 16, lease_id="1")]))
    assert not engine.is_ready("new", ([item(1)], [ticket(1, epoch="2" * 16, lease_id="2")]))
    engine.lose(engine.pulls[0])
    assert not engine.is_ready("old", images(1))
    assert not engine.is_ready("new", images(1))
    assert engine.side.take_unavailable() == {"old"}
    assert engine.pulls[-1].ticket.epoch == "2" * 16


def test_one_identifier_for_two_contents_of_a_request(engine: Engine) -> None:
    assert not engine.is_ready("r", ([item(1), item(1, end=20)], [ticket(1), ticket(2)]))
    assert engine.side.take_unavailable() == {"r"}


# Whatever the order

MOST_REQUESTS = 4


@dataclass
class Asked:
    """A request as the engine has it."""

    media: Media
    computed: int = 0
    is_ready: bool = False

    @property
    def needed(self) -> dict[str, str]:
        """Identifiers and keys of what is not computed yet."""
        items, tickets = self.media
        return {
            item.identifier: ticket.key for item, ticket in zip(items, tickets, strict=True) if item.end > self.computed
        }


class AnyOrder(RuleBasedStateMachine):
    """Requests, passes of the engine, pulls and their ends in any order, in a region that is too small for all."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(num_pages=4, on_free=self.check_not_needed)
        self.asked: dict[str, Asked] = {}
        self.loading: dict[int, Block] = {}
        self.num_requests = 0

    def check_not_needed(self, block: Block) -> None:
        assert block not in self.loading.values()
        if block.state is BlockState.READY:
            assert block.key not in self.needed()

    def needed(self) -> set[str]:
        """Keys that requests which were said to be ready count on."""
        return {key for asked in self.asked.values() if asked.is_ready for key in asked.needed.values()}

    def under_way(self) -> list[Pull]:
        return [pull for pull in self.engine.pulls if not pull.is_over]

    @precondition(lambda self: len(self.asked) < MOST_REQUESTS)
    @rule(numbers=st.lists(st.integers(1, 5), min_size=1, max_size=3))
    def request(self, numbers: list[int]) -> None:
        self.num_requests += 1
        self.asked[f"r{self.num_requests}"] = Asked(images(*numbers))

    @rule(
        progress=st.lists(st.sampled_from([0, 5, 10]), min_size=MOST_REQUESTS, max_size=MOST_REQUESTS),
        num_loads=st.integers(0, 2),
        freed=st.integers(1, 5),
    )
    def pass_over_all(self, progress: list[int], num_loads: int, freed: int) -> None:
        for (name, asked), computed in zip(self.asked.items(), progress, strict=False):
            asked.is_ready = False  # what it needed in its last step it need not have any more
            asked.is_ready = self.engine.is_ready(name, asked.media, asked.computed)
            if asked.is_ready:
                assert all(self.engine.side.has(identifier) for identifier in asked.needed)
                for identifier in list(asked.needed)[:num_loads]:
                    self.engine.side.load(identifier)
                asked.computed += computed
        self.take_loads([item(freed).identifier])
        for name in self.engine.side.take_unavailable():
            assert not self.asked[name].is_ready
            self.engine.side.finish(name)
            del self.asked[name]

    def take_loads(self, freed: list[str]) -> None:
        for load in self.engine.side.take_loads(freed):
            self.loading[load.load_id] = self.block_of(load)

    def block_of(self, load: Load) -> Block:
        """The block that a load reads, which is that of its identifier."""
        pulls = [pull for pull in self.engine.pulls if pull.block.state is BlockState.READY]
        (block,) = (pull.block for pull in pulls if pull.block.offset + HEADER_BYTES == load.offset)
        assert block.key == load.identifier
        return block

    @precondition(lambda self: self.asked)
    @rule(place=st.integers(0, MOST_REQUESTS))
    def preempt(self, place: int) -> None:
        for asked in list(self.asked.values())[place : place + 1]:
            asked.computed, asked.is_ready = 0, False

    @precondition(lambda self: self.asked)
    @rule(place=st.integers(0, MOST_REQUESTS))
    def finish(self, place: int) -> None:
        for name in list(self.asked)[place : place + 1]:
            self.engine.side.finish(name)
            del self.asked[name]

    @rule(num=st.integers(1, 3))
    def end_pulls(self, num: int) -> None:
        for pull in self.under_way()[:num]:
            self.engine.arrive(pull)

    @rule()
    def lose_pull(self) -> None:
        for pull in self.under_way()[-1:]:
            self.engine.lose(pull)

    @rule()
    def end_loads(self) -> None:
        load_ids = list(self.loading)
        self.loading.clear()
        self.engine.side.loaded(load_ids)

    @rule(seconds=st.sampled_from([1.0, TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.engine.now_s += seconds

    @invariant()
    def what_is_needed_is_there(self) -> None:
        assert all(self.engine.store.is_pinned(key) for key in self.needed())
        assert all(block.state is BlockState.READY for block in self.loading.values())

    def teardown(self) -> None:
        for name in self.asked:
            self.engine.side.finish(name)
        self.take_loads([])
        self.end_loads()
        for pull in self.under_way():
            self.engine.arrive(pull)
        assert self.engine.store.num_pinned == 0
        self.engine.evict_all()
        assert self.engine.store.used_bytes == 0


TestAnyOrder = AnyOrder.TestCase
