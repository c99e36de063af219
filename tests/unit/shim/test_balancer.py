"""Which producer an item goes to, and who is passed over, on a clock that a test moves."""

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer_shim.balancer import Call, Health, assign, item_digest, rank
from consumer_shim.errors import ProducerError
from producer.wire.contract import Reason
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.unit.conftest import Clock

DOWN = ProducerError(grpc.StatusCode.UNAVAILABLE, "", "nobody there")
SILENT = ProducerError(grpc.StatusCode.DEADLINE_EXCEEDED, "", "Deadline Exceeded")
FULL = ProducerError(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, "no room")


@dataclass(eq=False)
class Peer:
    address: str
    health: Health = field(default_factory=Health)


def peers(num: int) -> list[Peer]:
    return [Peer(f"10.0.0.{number}:50051") for number in range(num)]


def digests(num: int) -> list[bytes]:
    return [item_digest(pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"%d" % number)) for number in range(num)]


def image(data: bytes) -> pb.MediaItem:
    return pb.MediaItem(modality=pb.MODALITY_IMAGE, data=data)


def decoded(*shape: int, data: bytes = b"xxxxxx", rate_hz: float = 0.0) -> pb.MediaItem:
    form = pb.DecodedMedia(shape=shape, data=data, rate_hz=rate_hz)
    return pb.MediaItem(modality=pb.MODALITY_IMAGE, decoded=form)


# What an item is


def test_equal_items_have_equal_digests() -> None:
    assert item_digest(image(b"one")) == item_digest(image(b"one"))
    assert item_digest(decoded(1, 2, 3)) == item_digest(decoded(1, 2, 3))


def test_whatever_differs_makes_another_digest() -> None:
    items = [
        *(image(b"xxxxxx"), image(b"xxxxxy"), image(b"")),
        pb.MediaItem(modality=pb.MODALITY_VIDEO, data=b"xxxxxx"),
        *(decoded(1, 2, 3), decoded(2, 1, 3), decoded(12, 3), decoded(1, 23)),
        *(decoded(1, 2, 3, data=b"xxxxxy"), decoded(1, 2, 3, rate_hz=16000.0), decoded(data=b"")),
        image(b"None xxxxxx"),
    ]
    assert len({item_digest(item) for item in items}) == len(items)


# Who has it


def test_the_order_of_configuration_means_nothing() -> None:
    three = peers(3)
    for digest in digests(50):
        assert rank(three, digest) == rank(three[::-1], digest)


def test_every_process_ranks_alike() -> None:
    """Hashes of Python's own differ by process; two servers would encode each item twice."""
    script = (
        "from tests.unit.shim.test_balancer import *; print(*(rank(peers(5), one)[0].address for one in digests(20)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [rank(peers(5), one)[0].address for one in digests(20)]


def test_each_has_its_share() -> None:
    shares = Counter(rank(peers(4), digest)[0].address for digest in digests(4000))
    assert len(shares) == 4
    assert all(850 < share < 1150 for share in shares.values())


@given(num=st.integers(2, 8), gone=st.integers(0, 7))
def test_one_that_goes_moves_only_its_own_items(num: int, gone: int) -> None:
    """And each to the next that it ranked."""
    all_of_them = peers(num)
    left = [peer for peer in all_of_them if peer is not all_of_them[gone % num]]
    for digest in digests(50):
        before = rank(all_of_them, digest)
        assert rank(left, digest) == [peer for peer in before if peer in left]


def test_items_of_one_go_together() -> None:
    three = peers(3)
    groups = assign(digests(60), range(60), three, ())
    assert sorted(place for places in groups.values() for place in places) == list(range(60))
    for peer, places in groups.items():
        assert places == [place for place in range(60) if rank(three, digests(60)[place])[0] is peer]


def test_only_the_places_that_are_asked_for() -> None:
    (group,) = assign(digests(9), [4], peers(3), ()).values()
    assert group == [4]


def test_who_had_an_item_is_not_asked_again() -> None:
    three = peers(3)
    first, second, third = rank(three, digests(1)[0])
    assert assign(digests(1), [0], three, (first,)) == {second: [0]}
    assert assign(digests(1), [0], three, (second, first)) == {third: [0]}
    assert assign(digests(1), [0], three, (second, first, third)) == {}


# Who is passed over


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(clock=clock, uniform=lambda low, high: 1.0)


def fail(health: Health, error: ProducerError = DOWN) -> Call:
    """One call that fails."""
    call = health.begin()
    health.failed(call, error)
    health.end(call)
    return call


def test_a_new_one_is_open(health: Health) -> None:
    assert health.is_open
    assert not health.begin().is_probe


@pytest.mark.parametrize("reason", ["", Reason.SHUTTING_DOWN, Reason.DEVICE_LOST])
def test_one_that_takes_no_work_is_passed_over_for_a_while(health: Health, clock: Clock, reason: str) -> None:
    fail(health, ProducerError(grpc.StatusCode.UNAVAILABLE, reason, "why"))
    assert not health.is_open
    clock.now_s += 0.99
    assert not health.is_open
    clock.now_s += 0.02
    assert health.is_open


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        ProducerError(grpc.StatusCode.INVALID_ARGUMENT, Reason.MEDIA_UNREADABLE, "no image"),
        ProducerError(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE_UNMEETABLE, "no time"),
        ProducerError(grpc.StatusCode.UNAVAILABLE, Reason.TRANSPORT_DOWN, "no transport"),
        ProducerError(grpc.StatusCode.CANCELLED, "", "the client is closed"),
    ],
)
def test_other_errors_close_nothing(health: Health, error: ProducerError) -> None:
    fail(health, error)
    assert health.is_open


def test_one_probe_at_a_time(health: Health, clock: Clock) -> None:
    fail(health)
    clock.now_s += 1.0
    probe = health.begin()
    assert probe.is_probe
    assert not health.is_open
    other = health.begin()  # where all are passed over
    assert not other.is_probe
    health.end(other)
    assert not health.is_open
    health.end(probe)  # cancelled: nobody knows
    assert health.is_open


def test_pauses_double_with_each_probe_that_fails_up_to_a_bound(health: Health, clock: Clock) -> None:
    pauses = []
    for _ in range(8):
        assert health.is_open
        fail(health)
        pauses.append(health.closed_until_s - clock.now_s)
        clock.now_s = health.closed_until_s
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_pauses_of_clients_differ(clock: Clock) -> None:
    pauses = []
    for _ in range(20):
        health = Health(clock=clock)
        fail(health)
        pauses.append(health.closed_until_s - clock.now_s)
    assert len(set(pauses)) > 1
    assert 0.75 <= min(pauses) <= max(pauses) <= 1.25


def test_calls_that_fail_together_are_one_failure(health: Health, clock: Clock) -> None:
    calls = [health.begin() for _ in range(50)]
    for call in calls:
        clock.now_s += 0.01
        health.failed(call, DOWN)
        health.end(call)
    assert health.closed_until_s - clock.now_s < 1.0


def test_an_answer_clears_it(health: Health, clock: Clock) -> None:
    for _ in range(4):
        fail(health)
        clock.now_s = health.closed_until_s
    fail(health, FULL)
    assert health.is_open
    fail(health)
    assert health.closed_until_s - clock.now_s == 1.0
    health.answered()
    assert health.is_open


# Silence


def test_no_answer_in_time_counts_as_a_failure(health: Health, clock: Clock) -> None:
    call = health.begin()
    clock.now_s += 5.0
    health.failed(call, SILENT)
    health.end(call)
    assert not health.is_open


def test_one_that_answers_others_meanwhile_is_only_slow(health: Health, clock: Clock) -> None:
    call = health.begin()
    clock.now_s += 2.0
    health.answered()
    clock.now_s += 3.0
    health.failed(call, SILENT)
    health.end(call)
    assert health.is_open


def test_one_that_dies_after_it_answered_others_is_down(health: Health, clock: Clock) -> None:
    call = health.begin()
    clock.now_s += 2.0
    health.answered()
    health.failed(call, DOWN)
    assert not health.is_open


def test_long_silence_is_suspect_before_any_call_fails(health: Health, clock: Clock) -> None:
    """A frozen producer takes calls and answers none; without this all would wait there until their deadline."""
    first = health.begin()
    clock.now_s += 9.9
    second = health.begin()
    assert (health.is_open, second.is_probe) == (True, False)
    clock.now_s += 0.2
    assert health.is_open
    probe = health.begin()
    assert probe.is_probe
    assert not health.is_open
    health.answered()
    assert health.is_open
    for call in (first, second, probe):
        health.end(call)


def test_silence_ends_with_the_calls(health: Health, clock: Clock) -> None:
    call = health.begin()
    clock.now_s += 60.0
    health.end(call)  # its client left
    assert not health.begin().is_probe


def test_a_long_rest_is_no_silence(health: Health, clock: Clock) -> None:
    health.end(health.begin())
    clock.now_s += 3600.0
    call = health.begin()
    assert health.is_open
    assert not call.is_probe


# Both together


def test_items_of_one_that_is_down_go_to_the_next(clock: Clock) -> None:
    three = [Peer(peer.address, Health(clock=clock)) for peer in peers(3)]
    first, second, _ = rank(three, digests(1)[0])
    fail(first.health)
    assert assign(digests(1), [0], three, ()) == {second: [0]}
    clock.now_s += 2.0
    assert assign(digests(1), [0], three, ()) == {first: [0]}


def test_a_probe_takes_all_items_of_its_request(clock: Clock) -> None:
    (only,) = [Peer(peer.address, Health(clock=clock)) for peer in peers(1)]
    other = Peer("10.0.0.9:1", Health(clock=clock))
    fail(only.health)
    clock.now_s += 2.0
    mine = [place for place in range(20) if rank([only, other], digests(20)[place])[0] is only]
    assert assign(digests(20), range(20), [only, other], ())[only] == mine
    assert len(mine) > 1


def test_where_all_are_passed_over_the_least_bad_is_tried(clock: Clock) -> None:
    three = [Peer(peer.address, Health(clock=clock, uniform=lambda low, high: 1.0)) for peer in peers(3)]
    for peer in three:
        fail(peer.health)
        clock.now_s += 0.1
    assert assign(digests(30), range(30), three, ()) == {three[0]: list(range(30))}
    assert assign(digests(30), range(30), three, (three[0],)) == {}  # that was a definite answer already


def test_where_all_are_equally_bad_items_go_where_they_belong(clock: Clock) -> None:
    three = [Peer(peer.address, Health(clock=clock, uniform=lambda low, high: 1.0)) for peer in peers(3)]
    for peer in three:
        fail(peer.health)
    assert assign(digests(30), range(30), three, ()) == assign(digests(30), range(30), peers_like(three), ())


def peers_like(found: list[Peer]) -> list[Peer]:
    """The same ones, as if all were well."""
    for peer in found:
        peer.health.answered()
    return found
