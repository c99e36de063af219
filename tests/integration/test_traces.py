"""What a request leaves at a collector and in the log, from the client's call to the pull, over a real gRPC port."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import pytest

from consumer_shim.client import AsyncProducer, ProducerError
from consumer_shim.config import ShimConfig
from consumer_shim.landing import Landing
from consumer_shim.pull import Pull, PullState
from consumer_shim.tickets import PullTicket
from producer.calls import CallRecorder
from producer.metrics import Metrics
from producer.wire.origin import Origin, work_for
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.tracing import Tracing
from tests.integration.rig import WAIT_S, Rig, eventually, image
from tests.kit.collector import Collector, SpanSeen, named

TRACE_ID = "a" * 32
ORIGIN = Origin("id-1", f"00-{TRACE_ID}-{'b' * 16}-01")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def tracing(collector: Collector) -> Iterator[Tracing]:
    tracing = Tracing(collector.address, 0.0, "rig")  # only what a caller sampled
    yield tracing
    tracing.close()


@pytest.fixture
async def traced(tracing: Tracing) -> AsyncIterator[Rig]:
    async with Rig(listen=lambda metrics: listen(metrics, tracing), tracing=tracing, max_queue_items=4) as rig:
        yield rig


@pytest.fixture
async def recorded() -> AsyncIterator[Rig]:
    """Without tracing."""
    async with Rig(listen=lambda metrics: listen(metrics, None)) as rig:
        yield rig


def listen(metrics: Metrics, tracing: Tracing | None) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(interceptors=[CallRecorder(metrics, tracing)])
    return server, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"


def has(*names: str) -> Any:
    """Whether a trace has as many spans of these names."""
    return lambda spans: all([one.name for one in spans].count(name) >= names.count(name) for name in names)


def parents(spans: Sequence[SpanSeen]) -> list[tuple[str, str]]:
    """Each span's name and its parent's, "" for one that is not there."""
    names = {one.span_id: one.name for one in spans}
    return sorted((one.name, names.get(one.parent_id, "")) for one in spans)


async def line(caplog: pytest.LogCaptureFixture, method: str) -> Any:
    """The one line about a call of `method`; it comes shortly after the answer."""
    found: list[Any] = []
    await eventually(lambda: found.extend(_about(caplog, method)) or found)
    assert len(_about(caplog, method)) == 1
    return found[0]


def _about(caplog: pytest.LogCaptureFixture, method: str) -> list[Any]:
    return [one for one in caplog.records if getattr(one, "fields", {}).get("method") == method]


# Traces


async def test_an_encode_from_the_call_to_the_pool(traced: Rig, collector: Collector, tracing: Tracing) -> None:
    client = AsyncProducer(traced.address, tracing=tracing)
    with work_for(ORIGIN):
        ok, bad = await client.encode([image(b"one"), image(b"bad")], WAIT_S)
    await client.close()
    assert isinstance(ok, pb.Ticket)
    assert isinstance(bad, ProducerError)
    spans = collector.trace(TRACE_ID, has("encode", "Encode", "item", "item", "preprocess", "publish"))
    assert parents(spans) == [
        ("Encode", "encode"),
        ("encode", ""),
        ("item", "Encode"),
        ("item", "Encode"),
        ("preprocess", "item"),
        ("preprocess", "item"),
        ("publish", "item"),
        ("queue", "item"),
        ("step", "item"),
    ]
    assert named(spans, "encode").parent_id == "b" * 16
    assert named(spans, "encode").attributes == {"address": traced.address, "items": 2}
    assert named(spans, "Encode").attributes == {"code": "OK"}
    fine, failed = sorted((one for one in spans if one.name == "item"), key=lambda one: one.failed)
    assert fine.attributes == {
        "modality": "image",
        "bytes": 3,
        "source": "encoder",
        "code": "OK",
        "rows": 3,
        "key": ok.key[:16],
    }
    assert failed.attributes["code"] == "INVALID_ARGUMENT"
    assert failed.attributes["reason"] == "MEDIA_UNREADABLE"
    step = named(spans, "step")
    assert step.attributes.items() >= {"items": 1, "rows": 3, "modality": "image"}.items()
    assert named(spans, "queue").end_ns == step.start_ns
    assert fine.start_ns <= step.start_ns <= step.end_ns <= named(spans, "publish").start_ns <= fine.end_ns
    assert ok.key not in str(spans)


async def test_a_step_of_several_traces_is_in_each(traced: Rig, collector: Collector) -> None:
    """Each item's trace has its part, with the step's number: no trace has to be searched for in another."""
    waiting = await traced.begin_step(b"first")
    calls = []
    for number, data in ((1, b"a"), (2, b"bb")):
        with work_for(Origin("", f"00-{number:032x}-{'b' * 16}-01")):
            calls.append(asyncio.create_task(traced.encode(data)))
    await eventually(lambda: len(traced.loop._batcher) == 2)
    traced.device.gate.set()
    await asyncio.gather(waiting, *calls)
    steps = [named(collector.trace(f"{number:032x}", has("step", "Encode")), "step") for number in (1, 2)]
    assert len({(one.attributes["step"], one.start_ns, one.end_ns) for one in steps}) == 1
    assert [(one.attributes["items"], one.attributes["rows"]) for one in steps] == [(2, 1), (2, 2)]


async def test_where_an_embedding_comes_from(traced: Rig, collector: Collector) -> None:
    waiting = await traced.begin_step(b"one")
    with work_for(ORIGIN):
        joined = asyncio.create_task(traced.encode(b"one"))
        await eventually(lambda: traced.sample("items_shared_total", source="in_flight"))
        traced.device.gate.set()
        await asyncio.gather(waiting, joined)
        await traced.encode(b"one")
    spans = collector.trace(TRACE_ID, has("Encode", "Encode"))
    assert [one.attributes["source"] for one in spans if one.name == "item"] == ["in_flight", "pool"]
    assert not {"preprocess", "step"} & {one.name for one in spans}


async def test_a_pull_over_grpc(traced: Rig, collector: Collector, tracing: Tracing) -> None:
    ticket = await traced.ticket(b"one")
    found = await asyncio.to_thread(pull, traced.address, ticket, tracing)
    assert found.state is PullState.READY
    spans = collector.trace(TRACE_ID, has("pull", "read", "Acquire", "Fetch", "Release"))
    assert parents(spans) == [
        ("Acquire", "pull"),
        ("Fetch", "read"),
        ("Release", "pull"),
        ("pull", ""),
        ("read", "pull"),
    ]
    assert named(spans, "pull").parent_id == "b" * 16
    assert named(spans, "pull").attributes.items() >= {"transport": "grpc", "rows": 3, "key": ticket.key[:16]}.items()
    assert named(spans, "Acquire").attributes.items() >= {"transport": "grpc", "code": "OK", "rows": 3}.items()
    assert ticket.key not in str(spans)
    assert ticket.lease_id not in str(spans)


async def test_a_pull_of_what_has_gone(traced: Rig, collector: Collector, tracing: Tracing) -> None:
    ticket = await traced.ticket(b"one")
    ticket.key = "0" * 64
    found = await asyncio.to_thread(pull, traced.address, ticket, tracing)
    assert found.state is PullState.FAILED
    spans = collector.trace(TRACE_ID, has("pull", "Acquire"))
    assert named(spans, "pull").failed
    assert named(spans, "pull").attributes["code"] == 503
    assert named(spans, "Acquire").attributes.items() >= {"code": "NOT_FOUND", "reason": "NOT_IN_POOL"}.items()


async def test_a_call_that_nobody_sampled_leaves_nothing(traced: Rig, collector: Collector, tracing: Tracing) -> None:
    await traced.fetch(await traced.ticket(b"one"))
    tracing.close()
    assert collector.spans == []


async def test_with_a_collector_that_is_down_all_is_served() -> None:
    tracing = Tracing("127.0.0.1:1", 1.0, "rig")
    async with Rig(listen=lambda metrics: listen(metrics, tracing), tracing=tracing) as rig:
        for data in (b"a", b"bb", b"ccc"):
            await rig.fetch(await rig.ticket(data))
    await asyncio.to_thread(tracing.close)


def pull(address: str, ticket: pb.Ticket, tracing: Tracing) -> Pull:
    """A pull for `ORIGIN`, through the shim's own parts."""
    config = ShimConfig(producers=(address,), transport="grpc", region_bytes=1 << 20)
    landing = Landing(config, tracing)
    try:
        wanted = PullTicket.from_message(ticket, address)
        block = landing.store.reserve(wanted.key, wanted.shape.block_bytes)
        found = Pull(wanted, block, time.monotonic() + WAIT_S, ORIGIN)
        landing.start(found)
    finally:
        landing._threads.shutdown(wait=True)
        landing.close()
    return found


# Request ids and the lines of the log


async def test_a_client_learns_the_id_that_it_sent(recorded: Rig) -> None:
    call = recorded.stub.Encode(pb.EncodeRequest(items=[image(b"one")]), metadata=ORIGIN.headers())
    await call
    assert ("x-request-id", "id-1") in tuple(await call.trailing_metadata())


@pytest.mark.parametrize("sent", [(), (("x-request-id", "not sane"),), (("x-request-id", "x" * 200),)])
async def test_or_one_that_was_made_for_it(recorded: Rig, sent: tuple[tuple[str, str], ...]) -> None:
    call = recorded.stub.Encode(pb.EncodeRequest(items=[image(b"one")]), metadata=sent)
    await call
    made = dict(tuple(await call.trailing_metadata()))["x-request-id"]
    assert len(made) == 32


async def test_an_error_names_it_too_and_keeps_its_details(recorded: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await recorded.stub.Encode(pb.EncodeRequest(), metadata=ORIGIN.headers())
    trailing = dict(tuple(raised.value.trailing_metadata()))
    assert trailing["x-request-id"] == "id-1"
    assert ProducerError.from_call(raised.value).reason == "MALFORMED_REQUEST"


async def test_a_success_is_a_line_at_debug(recorded: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "producer.calls")
    await recorded.ticket(b"one")
    found = await line(caplog, "Encode")
    assert found.levelname == "DEBUG"
    assert {**found.fields, "seconds": 0} == {
        "method": "Encode",
        "code": "OK",
        "seconds": 0,
        "items": "1 OK",
        "client": "host 127.0.0.1",
    }


async def test_an_item_that_fails_is_a_line_at_info_with_the_reason(
    recorded: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "producer.calls")
    await recorded.encode(b"one", b"bad SECRET", b"bad too")
    found = await line(caplog, "Encode")
    assert found.levelname == "INFO"
    assert found.fields["items"] == "2 INVALID_ARGUMENT MEDIA_UNREADABLE, 1 OK"
    assert "SECRET" not in caplog.text


async def test_a_call_that_fails_is_a_line_at_info_with_the_reason(
    recorded: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "producer.calls")
    with pytest.raises(ProducerError):
        await asyncio.to_thread(
            recorded.client.acquire, key="0" * 64, epoch="0" * 16, lease_id="", transport="grpc", timeout_s=WAIT_S
        )
    found = await line(caplog, "Acquire")
    assert (found.levelname, found.fields["code"]) == ("INFO", "FAILED_PRECONDITION")
    assert found.fields["reason"] == "EPOCH_MISMATCH"


async def test_a_client_that_leaves_is_a_line(recorded: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "producer.calls")
    call = await recorded.begin_step(b"one")
    call.cancel()
    await eventually(lambda: [one for one in caplog.records if "CANCELLED" in one.getMessage()])


async def test_a_stream_is_one_call(recorded: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "producer.calls")
    items = [image(b"one"), image(b"bad")]
    found = await asyncio.to_thread(lambda: list(recorded.client.encode_stream(items, WAIT_S)))
    assert len(found) == 2
    seen = await line(caplog, "EncodeStream")
    assert seen.fields["items"] == "1 INVALID_ARGUMENT MEDIA_UNREADABLE, 1 OK"


async def test_what_goes_wrong_on_the_device_thread_has_the_id(
    recorded: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from producer.wire.origin import current

    seen = []
    monkeypatch.setattr(recorded.device, "launch", None)
    recorded.loop._launch = lambda items: 1 / 0  # type: ignore[assignment, return-value]
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(current().request_id)  # type: ignore[method-assign]
    logger = logging.getLogger("producer.step_loop")
    logger.addHandler(handler)
    with work_for(ORIGIN):
        await recorded.encode(b"one")
    logger.removeHandler(handler)
    assert seen == ["id-1"]
