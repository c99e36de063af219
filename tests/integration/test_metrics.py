"""What the service counts of its calls, its leases and its pulls; and that no client can add a series to that."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from time import monotonic
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from producer.calls import CallRecorder, code_of
from producer.embedding_pool import LEASE_MARGIN_S
from producer.metrics import Metrics
from producer.security import TokenInterceptor
from producer.wire.block import EmbeddingShape
from producer.wire.contract import SERVICE_NAME, WIRE_VERSION
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.integration.rig import MAX_ITEMS, WIDTH, Rig, eventually, image
from tests.kit.samples import strangers

ROWS = EmbeddingShape(num_rows=5, width=WIDTH, dtype="float32")


def acquire(ticket: pb.Ticket, transport: str = "grpc") -> pb.AcquireRequest:
    return pb.AcquireRequest(key=ticket.key, epoch=ticket.epoch, transport=transport, wire_version=WIRE_VERSION)


async def code_of_call(call: Any) -> str:
    """How a call ends."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def unknown(rig: Rig, method: str) -> Any:
    """A call, without a body, of any method."""
    return rig.channel.unary_unary(method)(b"")


# Calls


async def counted(rig: Rig, method: str, code: str, number: int = 1) -> None:
    await eventually(lambda: rig.sample("requests_total", method=method, code=code) == number)


async def test_each_call_counts_as_what_it_ended_with(rig: Rig) -> None:
    await rig.stub.GetModelInfo(pb.GetModelInfoRequest())
    await counted(rig, "GetModelInfo", "OK")
    ticket = await rig.ticket(b"photo")
    await counted(rig, "Encode", "OK")
    assert await code_of_call(rig.stub.Encode(pb.EncodeRequest())) == "INVALID_ARGUMENT"
    await counted(rig, "Encode", "INVALID_ARGUMENT")
    assert await code_of_call(rig.stub.Acquire(acquire(ticket, "telepathy"))) == "INVALID_ARGUMENT"
    await counted(rig, "Acquire", "INVALID_ARGUMENT")
    await rig.fetch(ticket)
    for method in ("Acquire", "Fetch", "Release"):
        await counted(rig, method, "OK")
    assert await code_of_call(rig.stub.Fetch(pb.FetchRequest(lease_id="x")).read()) == "NOT_FOUND"
    await counted(rig, "Fetch", "NOT_FOUND")


async def test_a_series_is_looked_up_once_and_not_for_each_call(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[tuple[str, ...]] = []
    for metric in (rig.metrics.requests, rig.metrics.items):

        def labels(*values: str, real: Any = metric.labels) -> Any:
            looked_up.append(values)
            return real(*values)

        monkeypatch.setattr(metric, "labels", labels)
    for number in range(5):
        await rig.ticket(b"photo %d" % number)
    await counted(rig, "Encode", "OK", 5)
    assert looked_up.count(("Encode", "OK")) == looked_up.count(("OK",)) == 1


async def test_a_stream_counts_once_when_it_ends(rig: Rig) -> None:
    async def requests() -> AsyncIterator[pb.EncodeStreamRequest]:
        for index in range(3):
            yield pb.EncodeStreamRequest(id=index, item=image(b"photo"))

    assert len([one async for one in rig.stub.EncodeStream(requests())]) == 3
    await counted(rig, "EncodeStream", "OK")
    call = rig.stub.EncodeStream()
    await call.write(pb.EncodeStreamRequest(item=image(b"photo")))
    await call.read()
    call.cancel()
    await counted(rig, "EncodeStream", "CANCELLED")
    assert rig.sample("requests_total", method="EncodeStream") == 2


async def test_a_client_that_leaves_is_cancelled(rig: Rig) -> None:
    call = await rig.begin_step(b"photo")
    call.cancel()
    await counted(rig, "Encode", "CANCELLED")


async def test_what_is_no_method_of_ours_is_one_series(rig: Rig) -> None:
    for method in (f"/{SERVICE_NAME}/Encod", "/a/b", f"/{SERVICE_NAME}/{'x' * 1000}"):
        assert await code_of_call(unknown(rig, method)) == "UNIMPLEMENTED"
    await counted(rig, "other", "UNIMPLEMENTED", 3)


class Ending:
    """The context of a call, as gRPC's. It does not reproduce calls."""

    def __init__(self, code: Any, left_s: float | None) -> None:
        self.code = lambda: code
        self.time_remaining = lambda: left_s


@pytest.mark.parametrize(
    ("error", "code", "left_s", "expected"),
    [
        (None, 0, None, "OK"),
        (None, None, None, "OK"),
        (None, grpc.StatusCode.ABORTED, None, "ABORTED"),
        (asyncio.CancelledError(), 0, None, "CANCELLED"),
        (asyncio.CancelledError(), 0, 5.0, "CANCELLED"),
        (asyncio.CancelledError(), 0, 0.0, "DEADLINE_EXCEEDED"),
        (GeneratorExit(), 0, None, "CANCELLED"),
        (KeyError(), 0, None, "UNKNOWN"),
        (Exception(), 8, None, "RESOURCE_EXHAUSTED"),
        (Exception(), 99, None, "UNKNOWN"),
    ],
)
def test_the_code_of_an_end(error: BaseException | None, code: Any, left_s: float | None, expected: str) -> None:
    deadline_s = math.inf if left_s is None else monotonic() + left_s
    assert code_of(error, Ending(code, left_s), deadline_s) == expected


class Gone(Ending):
    """The context of a call: once `is_gone`, to ask it anything is what ends a process with the real one."""

    def __init__(self, left_s: float | None) -> None:
        super().__init__(0, left_s)
        self.is_gone = False

    def __getattribute__(self, name: str) -> Any:
        if name != "is_gone" and self.is_gone:
            raise AssertionError(f"{name} was asked of a context that is gone")
        return super().__getattribute__(name)

    def invocation_metadata(self) -> Any:
        return ()

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Nobody reads it here."""

    def peer_identities(self) -> Any:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


@pytest.mark.parametrize(("left_s", "code"), [(None, "CANCELLED"), (0.0, "DEADLINE_EXCEEDED")])
@pytest.mark.parametrize("method", [f"/{SERVICE_NAME}/EncodeStream", "/grpc.health.v1.Health/Watch"])
async def test_a_stream_that_is_collected_asks_nothing_of_its_context(
    method: str, left_s: float | None, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, context = Metrics(), Gone(left_s)
    caplog.set_level("DEBUG", "producer.calls")

    async def answer(request: Any, context: Any) -> AsyncIterator[str]:
        yield "one"
        yield "two"

    async def handler(details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(answer)

    details: Any = SimpleNamespace(method=method)
    recorded = await CallRecorder(metrics).intercept_service(handler, details)
    stream = recorded.stream_stream(None, context)
    assert await anext(stream) == "one"
    context.is_gone = True
    await stream.aclose()  # as asyncio does it for a generator that was collected
    name = "EncodeStream" if method.endswith("EncodeStream") else "other"
    assert metrics.requests.labels(name, code)._value.get() == 1
    assert len(caplog.records) == (name != "other")


async def test_handlers_that_are_made_anew_are_counted_and_not_kept() -> None:
    metrics = Metrics()
    recorder = CallRecorder(metrics)
    details: Any = SimpleNamespace(method="/grpc.health.v1.Health/Check")

    async def answer(request: Any, context: Any) -> str:
        return "answer"

    async def new(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(answer)

    for _ in range(100):
        handler = await recorder.intercept_service(new, details)
        assert await handler.unary_unary(None, Ending(0, None)) == "answer"
    assert len(recorder._recorded) <= 64
    assert metrics.requests.labels("other", "OK")._value.get() == 100


# Leases and pulls


async def test_a_pull_is_counted_from_acquire_to_release(rig: Rig) -> None:
    lease = await rig.stub.Acquire(acquire(await rig.ticket(b"photo")))
    rig.now_s += 3.0
    await rig.stub.Release(pb.ReleaseRequest(lease_id=lease.lease_id))
    assert rig.sample("pulls_total", transport="grpc") == 1
    assert rig.sample("pull_bytes_total", transport="grpc") == ROWS.block_bytes
    assert rig.sample("pull_seconds_sum", transport="grpc") == pytest.approx(3.0)
    assert rig.sample("pull_failures_total") == 0


async def test_a_pull_that_is_never_released_has_failed(rig: Rig) -> None:
    """A ticket that is never used has not: its lease is for no transport."""
    await rig.stub.Acquire(acquire(await rig.ticket(b"photo")))
    assert rig.pool.num_leases == 2
    rig.now_s += rig.pool.lease_s + LEASE_MARGIN_S + 1
    rig.pool.expire()
    assert rig.pool.num_leases == 0
    assert (rig.pool.num_granted, rig.pool.num_expired) == (2, 2)
    assert rig.sample("pull_failures_total", transport="grpc") == rig.sample("pull_failures_total") == 1
    assert rig.sample("pulls_total") == 0


async def test_a_transport_that_is_down_fails_pulls(rig: Rig) -> None:
    ticket = await rig.ticket(b"photo")
    assert await code_of_call(rig.stub.Acquire(acquire(ticket, "falling"))) == "UNAVAILABLE"
    assert rig.sample("pull_failures_total", transport="falling") == 1


async def test_items_are_looked_for_in_the_pool(rig: Rig) -> None:
    for _ in range(3):
        await rig.ticket(b"photo")
    await rig.ticket(b"another")
    assert [rig.sample("pool_lookups_total", result=result) for result in ("hit", "miss")] == [2, 2]
    assert rig.sample("items_shared_total", source="pool") == 2


# Hostile clients


async def test_no_client_can_add_a_series(rig: Rig) -> None:
    random_ = random.Random(6)

    def words() -> str:
        return "".join(chr(random_.choice((random_.randrange(32, 127), 0xFC, 0x1F600))) for _ in range(20))

    ticket = await rig.ticket(b"photo")
    items = [pb.MediaItem(modality=random_.randrange(1 << 31), data=b"x") for _ in range(MAX_ITEMS - 3)]  # type: ignore[arg-type]
    items += [image(b"bad"), image(b"unforeseen"), image(b"not finite")]
    await code_of_call(rig.stub.Encode(pb.EncodeRequest(items=items)))
    for index in range(20):
        word = words()
        calls = [
            rig.stub.Encode(pb.EncodeRequest(items=[image(word.encode())], fingerprint=word, wire_version=index)),
            rig.stub.Encode(pb.EncodeRequest(items=[image(word.encode())], settings={word: word})),
            rig.stub.Encode(pb.EncodeRequest(items=[image(word.encode())]), metadata=[("x-request-id", f"id-{index}")]),
            rig.stub.Acquire(acquire(ticket, word)),
            rig.stub.Acquire(pb.AcquireRequest(key=word, epoch=word, lease_id=word, transport=word)),
            rig.stub.Release(pb.ReleaseRequest(lease_id=word)),
            rig.stub.Fetch(pb.FetchRequest(lease_id=word)).read(),
            unknown(rig, f"/{SERVICE_NAME}/Method{index}"),
            unknown(rig, f"/service-{random_.random()}/Encode"),
        ]
        await asyncio.gather(*map(code_of_call, calls))
    before = {family.name: len(family.samples) for family in rig.metrics.registry.collect()}
    assert rig.sample("requests_total", method="other") == 40
    assert strangers(rig.metrics.registry.collect(), Metrics.declarations()) == []
    await code_of_call(unknown(rig, "/one/more"))
    await code_of_call(rig.stub.Acquire(acquire(ticket, words())))
    assert {family.name: len(family.samples) for family in rig.metrics.registry.collect()} == before


async def test_what_other_interceptors_refuse_is_counted(tmp_path: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("somebody:" + "a" * 32)

    def listen(metrics: Metrics) -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server(interceptors=[CallRecorder(metrics), TokenInterceptor(str(tokens))])
        reflection.enable_server_reflection((SERVICE_NAME,), server)
        return server, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"

    async with Rig(listen=listen) as rig:
        assert await code_of_call(rig.stub.GetModelInfo(pb.GetModelInfoRequest())) == "UNAUTHENTICATED"
        await counted(rig, "GetModelInfo", "UNAUTHENTICATED")
        stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
        assert await code_of_call(stub.ServerReflectionInfo().read()) == "UNAUTHENTICATED"
        await counted(rig, "other", "UNAUTHENTICATED")
        assert strangers(rig.metrics.registry.collect(), Metrics.declarations()) == []
