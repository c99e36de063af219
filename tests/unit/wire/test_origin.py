"""Whom work is for: what is taken of what comes from outside, and where it is known."""

import json
import threading

import pytest

from producer.wire.origin import NOBODY, Origin, current, set_current, work_for

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
WHOLE = Origin("id-1", TRACEPARENT, "vendor=1")


@pytest.mark.parametrize("origin", [WHOLE, Origin("id-1"), Origin("", TRACEPARENT), NOBODY])
def test_it_survives_headers_and_json(origin: Origin) -> None:
    assert Origin.from_headers(origin.headers()) == origin
    assert Origin.from_params(json.loads(json.dumps(origin.to_params()))) == origin


def test_headers_may_be_bytes_of_any_case() -> None:
    headers = [(b"X-Request-ID", b"id-1"), (b"TraceParent", TRACEPARENT.encode()), (b"tracestate", b"vendor=1")]
    assert Origin.from_headers(headers) == WHOLE


@pytest.mark.parametrize("request_id", ["a", "A.b_c:d/e+f=g@h-9", "x" * 128])
def test_a_sane_id_is_kept(request_id: str) -> None:
    assert Origin.from_headers([("x-request-id", request_id)]).named().request_id == request_id


@pytest.mark.parametrize(
    "request_id", ["", "x" * 129, "a b", "a\nb", "a\x1b[2J", "ü", '"', "a,b", "{}", b"\xff\xfe", None, 5, ["id"]]
)
def test_another_is_replaced_by_one_made_here(request_id: object) -> None:
    origin = Origin.from_headers([("x-request-id", request_id)])
    assert origin == NOBODY
    made = {origin.named().request_id for _ in range(10)}
    assert len(made) == 10
    assert all(len(one) == 32 and set(one) <= set("0123456789abcdef") for one in made)


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"00-{'A' * 32}-{'b' * 16}-01",
        f"{TRACEPARENT}-more",
        f"{TRACEPARENT}\n",
        TRACEPARENT[:-1],
    ],
)
def test_a_trace_that_is_none_is_left_out_with_its_state(traceparent: str) -> None:
    assert Origin.from_headers([("traceparent", traceparent), ("tracestate", "vendor=1")]) == NOBODY


@pytest.mark.parametrize("tracestate", ["x" * 513, "a\nb", "ü"])
def test_a_state_that_is_none_is_left_out(tracestate: str) -> None:
    origin = Origin.from_headers([("traceparent", TRACEPARENT), ("tracestate", tracestate)])
    assert origin == Origin("", TRACEPARENT)


def test_of_a_header_that_comes_twice_the_first_counts() -> None:
    assert Origin.from_headers([("x-request-id", "one"), ("x-request-id", "two")]).request_id == "one"


@pytest.mark.parametrize("params", [None, [], "x-request-id", 5, {5: "a"}, {"x-request-id": {"a": 1}}, [["a", "b"]]])
def test_params_that_are_none_are_nobody(params: object) -> None:
    assert Origin.from_params(params) == NOBODY


def test_its_trace() -> None:
    assert (WHOLE.trace_id, WHOLE.is_sampled) == ("a" * 32, True)
    assert (NOBODY.trace_id, NOBODY.is_sampled) == ("", False)
    assert not Origin("", TRACEPARENT[:-1] + "0").is_sampled


def test_it_is_known_within_and_not_after() -> None:
    with work_for(WHOLE):
        assert current() == WHOLE
        with work_for(NOBODY):
            assert current() == NOBODY
        assert current() == WHOLE
    assert current() == NOBODY


def test_a_thread_has_its_own() -> None:
    seen = []

    def other() -> None:
        seen.append(current())
        set_current(Origin("other"))

    with work_for(WHOLE):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert current() == WHOLE
    assert seen == [NOBODY]
