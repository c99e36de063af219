"""What is sent again, when, and what comes of it: bookkeeping alone, on a clock that a test moves."""

from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer_shim import budget
from consumer_shim.budget import RetryBudget
from consumer_shim.errors import ProducerError
from consumer_shim.retries import Attempts
from producer.wire.contract import Reason
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.unit.conftest import Clock

TIMEOUT_S = 60.0
MOST = 3
Outcome = pb.Ticket | ProducerError


def item(name: str) -> pb.MediaItem:
    return pb.MediaItem(modality=pb.MODALITY_IMAGE, data=name.encode())


def ticket(name: str) -> pb.Ticket:
    return pb.Ticket(key=name)


def error(code: grpc.StatusCode, delay_s: float = 0.0, reason: str = "") -> ProducerError:
    return ProducerError(code, reason, code.name, delay_s)


def full(delay_s: float = 0.0) -> ProducerError:
    return error(grpc.StatusCode.RESOURCE_EXHAUSTED, delay_s, "QUEUE_FULL")


def down() -> ProducerError:
    return error(grpc.StatusCode.UNAVAILABLE)


def bad() -> ProducerError:
    return error(grpc.StatusCode.INVALID_ARGUMENT)


@pytest.fixture
def attempts(clock: Clock) -> Attempts:
    """Of items a, b and c."""
    return start("abc", clock)


def start(names: str, clock: Clock, timeout_s: float = TIMEOUT_S, **options: Any) -> Attempts:
    options = {"retries": RetryBudget(clock=clock)} | options
    return Attempts([item(name) for name in names], timeout_s, clock=clock, **options)


def pending(attempts: Attempts) -> str:
    return "".join(one.data.decode() for one in attempts.items)


# Which items


def test_an_answer_for_all(attempts: Attempts) -> None:
    assert pending(attempts) == "abc"
    answer: list[Outcome] = [ticket("a"), bad(), ticket("c")]
    assert attempts.take(answer) is None
    assert attempts.outcomes == answer


LATER = [
    (grpc.StatusCode.UNAVAILABLE, ""),
    (grpc.StatusCode.UNAVAILABLE, Reason.SHUTTING_DOWN),
    (grpc.StatusCode.UNAVAILABLE, Reason.TRANSPORT_DOWN),
    *(
        (grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        for reason in (
            *(Reason.QUEUE_FULL, Reason.POOL_FULL, Reason.TOO_MANY_LEASES),
            *(Reason.TOO_MANY_STREAMS, Reason.CLIENT_LIMIT),
        )
    ),
]
NEVER = [
    *((code, "") for code in grpc.StatusCode if code is not grpc.StatusCode.UNAVAILABLE),
    (grpc.StatusCode.UNAVAILABLE, Reason.DEVICE_LOST),
    (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE_UNMEETABLE),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "SOMETHING_NEW"),
]


@pytest.mark.parametrize(("code", "reason"), LATER)
def test_what_had_no_room_or_reached_nobody_is_sent_again(clock: Clock, code: grpc.StatusCode, reason: str) -> None:
    attempts = start("abc", clock)
    assert attempts.take([ticket("a"), error(code, reason=reason), bad()]) is not None
    assert pending(attempts) == "b"
    assert start("a", clock).failed(error(code, reason=reason)) is not None


@pytest.mark.parametrize(("code", "reason"), NEVER)
def test_nothing_else_is_sent_again(clock: Clock, code: grpc.StatusCode, reason: str) -> None:
    """Least of all RESOURCE_EXHAUSTED without a reason: gRPC's, for a message that is too large."""
    assert start("abc", clock).take([ticket("a"), error(code, reason=reason), bad()]) is None
    with pytest.raises(ProducerError):
        start("a", clock).failed(error(code, reason=reason))


def test_outcomes_keep_the_order_of_the_items(clock: Clock) -> None:
    attempts = start("abcde", clock)
    refused = bad()
    assert attempts.take([full(), ticket("b"), down(), ticket("d"), full()]) is not None
    assert pending(attempts) == "ace"
    assert attempts.take([ticket("a"), full(), refused]) is not None
    assert pending(attempts) == "c"
    assert attempts.take([ticket("c")]) is None
    assert attempts.outcomes == [ticket("a"), ticket("b"), ticket("c"), ticket("d"), refused]


def test_equal_items_have_outcomes_of_their_own(clock: Clock) -> None:
    attempts = start("aaa", clock)
    assert attempts.take([full(), ticket("1"), full()]) is not None
    assert pending(attempts) == "aa"
    assert attempts.take([ticket("2"), ticket("3")]) is None
    assert attempts.outcomes == [ticket("2"), ticket("1"), ticket("3")]


@pytest.mark.parametrize("num", [0, 1, 2, 4])
def test_another_number_of_answers(attempts: Attempts, num: int) -> None:
    with pytest.raises(ProducerError, match=f"the producer answered for {num} of 3 items") as failed:
        attempts.take([ticket("a")] * num)
    assert failed.value.code is grpc.StatusCode.INTERNAL


def test_another_number_of_answers_the_second_time(attempts: Attempts) -> None:
    assert attempts.take([ticket("a"), full(), ticket("c")]) is not None
    with pytest.raises(ProducerError, match="the producer answered for 3 of 1 items"):
        attempts.take([ticket("a"), ticket("b"), ticket("c")])


# When


def test_there_is_a_most_of_attempts(attempts: Attempts) -> None:
    errors = [full() for _ in range(MOST)]
    delays_s = [
        attempts.take([ticket("a"), errors[0], ticket("c")]),
        *map(attempts.take, [[one] for one in errors[1:]]),
    ]
    assert [delay_s is None for delay_s in delays_s] == [False, False, True]
    assert attempts.outcomes == [ticket("a"), errors[-1], ticket("c")]


def test_waits_grow(clock: Clock) -> None:
    attempts = start("abc", clock, uniform=lambda low, high: low)
    first_s, second_s = attempts.failed(down()), attempts.failed(down())
    assert first_s is not None
    assert second_s == 2 * first_s > 0


def test_waits_of_clients_differ(clock: Clock) -> None:
    """Those that were refused together must not come back together."""
    delays_s = {start("a", clock).failed(down()) for _ in range(20)}
    assert len(delays_s) > 1


def test_the_longest_delay_that_an_item_was_given_is_waited_for(attempts: Attempts) -> None:
    delay_s = attempts.take([full(2.0), full(5.0), full()])
    assert delay_s is not None
    assert 5.0 <= delay_s <= 10.0


def test_delays_of_what_is_not_sent_again_do_not_count(attempts: Attempts) -> None:
    delay_s = attempts.take([full(2.0), error(grpc.StatusCode.INTERNAL, 50.0), ticket("c")])
    assert delay_s is not None
    assert 2.0 <= delay_s < 50.0


def test_the_delay_that_a_whole_call_was_given_is_waited_for(attempts: Attempts) -> None:
    delay_s = attempts.failed(full(5.0))
    assert delay_s is not None
    assert 5.0 <= delay_s <= 10.0


def test_delays_of_earlier_outcomes_do_not_count(attempts: Attempts) -> None:
    assert attempts.take([full(20.0), ticket("b"), ticket("c")]) is not None
    delay_s = attempts.failed(down())
    assert delay_s is not None
    assert delay_s < 20.0


def test_a_whole_calls_delay_beyond_the_deadline_ends_it(attempts: Attempts) -> None:
    refused = full(TIMEOUT_S)
    with pytest.raises(ProducerError) as failed:
        attempts.failed(refused)
    assert failed.value is refused


def test_a_delay_beyond_the_deadline_ends_it(attempts: Attempts, clock: Clock) -> None:
    refused = full(TIMEOUT_S)
    assert attempts.take([ticket("a"), ticket("b"), refused]) is None
    assert attempts.outcomes == [ticket("a"), ticket("b"), refused]


def test_the_deadline_holds_for_all_attempts_together(attempts: Attempts, clock: Clock) -> None:
    assert attempts.left_s == TIMEOUT_S
    clock.now_s += 20.0
    assert attempts.failed(down()) is not None
    assert attempts.left_s == TIMEOUT_S - 20.0
    clock.now_s += TIMEOUT_S - 20.0
    assert attempts.left_s == 0.0
    with pytest.raises(ProducerError):
        attempts.failed(down())
    clock.now_s += 1.0
    assert attempts.left_s == 0.0


def test_no_attempt_begins_at_the_deadline(attempts: Attempts, clock: Clock) -> None:
    clock.now_s += TIMEOUT_S - 0.01
    assert attempts.take([full(), ticket("b"), ticket("c")]) is None


# A whole call


def test_a_call_that_reached_nobody_is_sent_again(attempts: Attempts) -> None:
    assert attempts.failed(down()) is not None
    assert pending(attempts) == "abc"
    assert attempts.take([ticket("a"), ticket("b"), ticket("c")]) is None
    assert attempts.outcomes == [ticket("a"), ticket("b"), ticket("c")]


def test_a_call_that_reached_nobody_for_too_long(attempts: Attempts) -> None:
    for _ in range(MOST - 1):
        assert attempts.failed(down()) is not None
    last = down()
    with pytest.raises(ProducerError) as failed:
        attempts.failed(last)
    assert failed.value is last


def test_a_call_that_is_refused(attempts: Attempts) -> None:
    refused = bad()
    with pytest.raises(ProducerError) as failed:
        attempts.failed(refused)
    assert failed.value is refused


@pytest.mark.parametrize("last", [bad(), error(grpc.StatusCode.DEADLINE_EXCEEDED), error(grpc.StatusCode.CANCELLED)])
def test_what_was_answered_before_stays(attempts: Attempts, last: ProducerError) -> None:
    """Those that wait for an answer share the call's error."""
    assert attempts.take([full(), ticket("b"), full()]) is not None
    assert attempts.failed(last) is None
    assert attempts.outcomes == [last, ticket("b"), last]


def test_what_was_answered_before_stays_when_nobody_is_reached_any_more(attempts: Attempts) -> None:
    assert attempts.take([ticket("a"), full(), bad()]) is not None
    assert attempts.failed(down()) is not None
    assert pending(attempts) == "b"
    last = down()
    assert attempts.failed(last) is None
    assert attempts.outcomes[:2] == [ticket("a"), last]


# The budget


def test_a_first_call_brings_a_share_and_each_retry_takes_a_token(clock: Clock) -> None:
    retries = RetryBudget(share=0.5, floor=1.0, clock=clock)
    attempts = start("a", clock, retries=retries)  # 1.5 tokens
    assert attempts.failed(down()) is not None
    last = down()
    with pytest.raises(ProducerError) as failed:
        attempts.failed(last)
    assert failed.value is last
    assert start("a", clock, retries=retries).failed(down()) is not None
    assert not retries.take()


def test_an_empty_budget_ends_it_with_the_answer_that_there_was(clock: Clock) -> None:
    retries = RetryBudget(share=0.0, floor=1.0, clock=clock)
    assert retries.take()
    refused = full()
    attempts = start("abc", clock, retries=retries)
    assert attempts.take([ticket("a"), refused, ticket("c")]) is None
    assert attempts.outcomes == [ticket("a"), refused, ticket("c")]


def test_a_call_that_is_a_retry_itself_brings_nothing(clock: Clock) -> None:
    retries = RetryBudget(share=1.0, floor=0.0, clock=clock)
    start("a", clock, retries=retries, is_again=True)
    assert not retries.take()
    start("a", clock, retries=retries)
    assert retries.take()


def test_what_is_not_sent_again_takes_nothing(clock: Clock) -> None:
    retries = RetryBudget(share=0.0, floor=1.0, clock=clock)
    start("a", clock, retries=retries).take([bad()])
    start("a", clock, retries=retries).take([full(TIMEOUT_S)])
    start("a", clock, retries=retries, most=1).take([full()])
    assert retries.take()


def test_without_another_it_is_the_processs_budget(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PROCESS", RetryBudget(share=1.0, floor=0.0, clock=clock))
    Attempts([item("a")], TIMEOUT_S)
    assert budget.PROCESS.take()
    assert not budget.PROCESS.take()


@pytest.mark.parametrize("most", [1, 2, 5])
def test_another_most_of_attempts(clock: Clock, most: int) -> None:
    attempts = start("a", clock, most=most)
    for _ in range(most - 1):
        assert attempts.failed(down()) is not None
    with pytest.raises(ProducerError):
        attempts.failed(down())


# Whatever the answers

CODES = st.sampled_from([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
DELAYS = st.sampled_from([0.0, 0.5, 30.0])
ERRORS = st.builds(full, DELAYS) | st.builds(error, CODES, DELAYS)


@given(num=st.integers(0, 5), timeout_s=st.sampled_from([0.01, 1.0, TIMEOUT_S]), data=st.data())
def test_any_script(num: int, timeout_s: float, data: st.DataObject) -> None:
    """An item has the last answer that it was given; none that has a ticket is sent again; it ends in time."""
    clock = Clock()
    end_s = clock.now_s + timeout_s
    names = "abcde"[:num]
    attempts = start(names, clock, timeout_s)
    answers: dict[str, Outcome] = {}
    for count in range(1, MOST + 2):
        assert count <= MOST
        assert 0.0 <= attempts.left_s <= max(0.0, end_s - clock.now_s) + 1e-9
        sent = pending(attempts)
        assert not any(isinstance(answers.get(name), pb.Ticket) for name in sent)
        whole = data.draw(st.none() | ERRORS)
        if whole is None:
            found: Sequence[Outcome] = [data.draw(st.just(ticket(name)) | ERRORS) for name in sent]
            answers |= dict(zip(sent, found, strict=True))
            delay_s = attempts.take(found)
        else:
            failure: ProducerError | None = None
            try:
                delay_s = attempts.failed(whole)
            except ProducerError as failed:
                failure = failed
            if failure is not None:
                assert failure is whole
                assert not answers
                return
            if delay_s is None:
                answers |= dict.fromkeys(sent, whole)
        if delay_s is None:
            break
        assert 0.0 < delay_s < end_s - clock.now_s
        clock.now_s += delay_s + data.draw(st.sampled_from([0.0, 0.2]))
    assert attempts.outcomes == [answers[name] for name in names]
