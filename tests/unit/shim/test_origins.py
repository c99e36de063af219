"""Whom a request is for: through the middleware to the producer and to vLLM, and from vLLM to the pull."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from consumer_shim import logs
from consumer_shim.logs import ShimLogger
from consumer_shim.scheduler import SchedulerSide
from consumer_shim.tickets import from_params
from producer.wire.origin import NOBODY, ORIGIN_PARAM, Origin, current, work_for
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.kit.collector import Collector, named
from tests.unit.shim.test_middleware import PATH, Encoder, Stack, chat, serving, ticket
from tests.unit.shim.test_scheduler import Engine, images

TRACE_ID = "a" * 32
TRACEPARENT = f"00-{TRACE_ID}-{'b' * 16}-01"
HEADERS = [(b"X-Request-Id", b"mine"), (b"traceparent", TRACEPARENT.encode()), (b"tracestate", b"vendor=1")]
KEY = "0123456789abcdef" * 4


class Listening(Encoder):
    """Keeps the metadata of its calls. One item a call."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: list[Origin] = []
        self.answer = self._listen

    async def _listen(self, context: Any) -> pb.EncodeResponse:
        self.origins.append(Origin.from_headers(context.invocation_metadata()))
        return pb.EncodeResponse(outcomes=[pb.ItemOutcome(ticket=ticket(0))])


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def engine() -> Engine:
    return Engine()


# The middleware


async def test_without_tracing_the_callers_trace_is_handed_on() -> None:
    async with serving(Listening()) as encoder:
        assert isinstance(encoder, Listening)
        stack = Stack([encoder.address])
        await stack.post(chat(b"one"), headers=HEADERS)
        assert encoder.origins == [Origin("mine", TRACEPARENT, "vendor=1")]
        assert Origin.from_params(stack.app.json["ec_transfer_params"][ORIGIN_PARAM]) == encoder.origins[0]
        assert stack.app.headers[b"X-Request-Id"] == b"mine"
        assert b"x-request-id" not in stack.app.headers


async def test_a_request_without_an_id_gets_one_everywhere() -> None:
    async with serving(Listening()) as encoder:
        assert isinstance(encoder, Listening)
        stack = Stack([encoder.address])
        await stack.post(chat(b"one"), headers=[])
        (origin,) = encoder.origins
        assert (len(origin.request_id), origin.traceparent) == (32, "")
        assert stack.app.headers[b"x-request-id"] == origin.request_id.encode()
        assert stack.app.json["ec_transfer_params"][ORIGIN_PARAM] == {"x-request-id": origin.request_id}
        assert len(from_params(stack.app.json["ec_transfer_params"])) == 1
    assert current() == NOBODY


async def test_a_clients_own_word_for_it_does_not_count() -> None:
    async with serving(Listening()) as encoder:
        stack = Stack([encoder.address])
        await stack.post(chat(b"one", ec_transfer_params={ORIGIN_PARAM: {"x-request-id": "forged"}}), headers=HEADERS)
        assert stack.app.json["ec_transfer_params"][ORIGIN_PARAM]["x-request-id"] == "mine"


@pytest.mark.parametrize("vllm_traces", [False, True])
async def test_spans_of_a_request(collector: Collector, vllm_traces: bool) -> None:
    """vLLM is told of the trace where it makes spans: else it would warn of each request."""
    async with serving(Listening()) as encoder:
        assert isinstance(encoder, Listening)
        stack = Stack([encoder.address], otlp_traces_endpoint=collector.address)
        endpoint = collector.address if vllm_traces else None
        stack.vllm_config.observability_config = SimpleNamespace(otlp_traces_endpoint=endpoint)
        await stack.post(chat(b"one"), headers=HEADERS)
        spans = collector.trace(TRACE_ID, lambda found: len(found) == 2)
        http, encode = named(spans, f"POST {PATH}"), named(spans, "encode")
        assert (http.parent_id, encode.parent_id) == ("b" * 16, http.span_id)
        assert http.attributes == {"code": 200}
        assert http.service == "ec-producer-shim"
        assert encode.attributes == {"address": encoder.address, "items": 1}
        below_http = f"00-{TRACE_ID}-{http.span_id}-01"
        assert encoder.origins[0].traceparent == f"00-{TRACE_ID}-{encode.span_id}-01"
        assert stack.app.json["ec_transfer_params"][ORIGIN_PARAM]["traceparent"] == below_http
        assert stack.app.headers[b"traceparent"] == (below_http if vllm_traces else TRACEPARENT).encode()
        _close(stack)


async def test_a_refusal_has_failed_and_is_said(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "consumer_shim.middleware")
    async with serving(Encoder()) as encoder:
        encoder.refuse(grpc.StatusCode.INTERNAL, "SECRET")
        stack = Stack([encoder.address], otlp_traces_endpoint=collector.address)
        client = await stack.post(chat(b"one"), headers=HEADERS)
        assert (client.status, client.headers[b"x-request-id"]) == (502, b"mine")
        spans = collector.trace(TRACE_ID, lambda found: len(found) == 2)
        assert named(spans, f"POST {PATH}").failed
        assert named(spans, "encode").attributes["code"] == "INTERNAL"
        _close(stack)
    (said,) = caplog.messages
    assert said.startswith(f"{PATH} is answered with 502 INTERNAL [request_id=mine trace_id={TRACE_ID}]")
    assert "SECRET" not in str(spans)


async def test_a_request_without_media_leaves_no_span(collector: Collector) -> None:
    async with serving(Encoder()) as encoder:
        stack = Stack([encoder.address], otlp_traces_endpoint=collector.address)
        await stack.post(b'{"messages": []}', headers=HEADERS)
        _close(stack)
    assert collector.spans == []


def _close(stack: Stack) -> None:
    encoder = stack.middleware._encoder
    assert encoder is not None
    assert encoder.tracing is not None
    encoder.tracing.close()


# The scheduler


def test_a_pull_is_for_the_request_that_began_it(engine: Engine) -> None:
    asked: list[str] = []

    def origin(name: str) -> Origin:
        asked.append(name)
        return Origin(name)

    for _ in range(2):
        for name in ("first", "second"):
            engine.side.is_ready(name, 0, lambda: images(1), lambda name=name: origin(name))  # type: ignore[misc]
    (pull,) = engine.pulls
    assert pull.origin == Origin("first")
    assert asked == ["first", "second"]


def test_tickets_that_were_left_say_whom_they_are_for(engine: Engine) -> None:
    items, tickets = images(1)
    side: SchedulerSide = engine.side
    named_by_key = [type(one)(**{**_fields(one), "identifier": tickets[0].key}) for one in items]
    side.leave_tickets(tickets, Origin("beam"))
    side.is_ready("one of its own", 0, lambda: (named_by_key, []))
    assert [pull.origin for pull in engine.pulls] == [Origin("beam")]


def _fields(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


# Lines


def test_a_line_says_whom_it_is_about(caplog: pytest.LogCaptureFixture) -> None:
    logger = ShimLogger("consumer_shim.x")
    with work_for(Origin("mine", TRACEPARENT)):
        logger.warning("no %s from\n%s", KEY, "here")
    logger.warning("100% plain")
    assert caplog.messages == [
        rf"no 0123456789abcdef… from\nhere [request_id=mine trace_id={TRACE_ID}]",
        "100% plain",
    ]
    assert [one.filename for one in caplog.records] == ["test_origins.py"] * 2


def test_lines_go_where_vllms_go(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, vllm, root = (logging.Logger(name) for name in ("ours", "vllm", "root"))
    found = {"consumer_shim": ours, "vllm": vllm, "": root}
    monkeypatch.setattr(logs.logging, "getLogger", lambda name="": found[name])
    logs.join_vllm()
    assert ours.handlers == []  # vLLM has none
    handler = logging.NullHandler()
    vllm.addHandler(handler)
    vllm.setLevel("WARNING")
    logs.join_vllm()
    logs.join_vllm()
    assert (ours.handlers, ours.level) == ([handler], logging.WARNING)
    ours.removeHandler(handler)
    root.addHandler(handler)
    logs.join_vllm()
    assert ours.handlers == []  # whoever set the root's wants them there
