"""The load suite: more clients, and worse ones, than the service has room for."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.message import Message

from consumer_shim.client import ProducerError, outcomes
from producer.wire.contract import SERVICE_NAME, WIRE_VERSION, Reason
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.serving.service import (
    CALL_S,
    EXPIRY_S,
    ITEM_BYTES,
    POOL_BYTES,
    QUEUE_ITEMS,
    Service,
    Usage,
    code_of,
    image,
)
from tests.serving.table import Record

REFUSED_WITHIN_S = 3.0
"""'At once', for the last of all calls of a burst that the same two cores send and answer."""
SIDE = 224
"""Of pictures with as many rows as there may be: 64."""


def overload(service: Service, record: Record, scale: float) -> None:
    """Many at once: each item is encoded or refused at once with a time to come back, as the service counts, too."""
    before = Counter(service.counts())
    calls = [service.send(one) for one in service.new_pictures(int(200 * scale) + QUEUE_ITEMS)]
    tickets = service.collect(record, calls, "OK", "RESOURCE_EXHAUSTED")
    for call in calls:
        for outcome in call.outcomes() or []:
            if isinstance(outcome, ProducerError):
                record.expect(outcome.retry_delay_s > 0, f"{outcome.reason} without RetryInfo")
                late = outcome.reason == Reason.QUEUE_FULL and call.took_s > REFUSED_WITHIN_S
                record.hung += late
                record.outcomes[code_of(outcome)] -= late
    record.expect(record.outcomes["RESOURCE_EXHAUSTED"] > 0, "nothing was refused: this is no overload")
    counted = Counter(service.counts()) - before
    record.expect(counted == +record.outcomes, f"the service counts {dict(counted)}")
    service.check(record, tickets)
    service.check_settled(record)


def closed_loop(service: Service, record: Record, scale: float) -> None:
    """Twice as many clients as places, each with one call at a time, of known and of new pictures."""
    known = [*service.truth][:20] or service.new_pictures(20)
    lock = threading.Lock()

    def client(number: int) -> None:
        for turn in range(max(2, int(8 * scale))):
            call = service.send(known[(number + turn) % len(known)], *service.new_pictures(2, SIDE))
            call.outcomes()
            with lock:
                service.check(record, service.collect(record, [call], "OK", "RESOURCE_EXHAUSTED"))

    with ThreadPoolExecutor(2 * QUEUE_ITEMS) as threads:
        list(threads.map(client, range(2 * QUEUE_ITEMS)))
    service.check_settled(record)


def many_items(service: Service, record: Record, scale: float) -> None:
    """Requests of several items, some of them hopeless: each item has its own outcome, at its own place."""
    good = service.new_pictures(3)
    for _ in range(max(3, int(20 * scale))):
        mixed = random.sample([*good, b"", b"no picture", good[0][:60]], 6)
        call = service.send(*mixed)
        found = call.outcomes() or []
        service.check(record, service.collect(record, [call], "OK", "INVALID_ARGUMENT"))
        right = [
            code_of(one) == ("OK" if data in good else "INVALID_ARGUMENT")
            for data, one in zip(mixed, found, strict=False)
        ]
        record.expect(all(right), "an outcome stands at another item's place")
    service.check_settled(record)


def deadlines(service: Service, record: Record, scale: float) -> None:
    """From a millisecond to seconds, under load: an embedding, or an error by then."""
    for _ in range(max(1, int(5 * scale))):
        times_s = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0] * 4
        random.shuffle(times_s)
        calls = [service.send(*service.new_pictures(1, SIDE), timeout_s=time_s) for time_s in times_s]
        service.check(record, service.collect(record, calls, "OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"))
    service.check_settled(record, EXPIRY_S)


def cancellations(service: Service, record: Record, scale: float) -> None:
    """Clients that leave at random moments: nothing of theirs stays."""
    for _ in range(max(2, int(20 * scale))):
        pictures = service.new_pictures(QUEUE_ITEMS, SIDE)
        calls = [service.send(*pictures[n : n + 2]) for n in range(0, QUEUE_ITEMS, 2)]
        for call in random.sample(calls, len(calls)):
            time.sleep(random.uniform(0, 0.005))
            call.future.cancel()
        service.check(record, service.collect(record, calls, "OK", "CANCELLED", "RESOURCE_EXHAUSTED"))
    service.check_settled(record, EXPIRY_S)


def same_item(service: Service, record: Record, scale: float) -> None:
    """The same picture by many at once is encoded once; the others share it."""
    number = max(8, int(64 * scale))
    (one,) = service.new_pictures(1, SIDE)
    before = service.server.metric("ec_producer_items_shared_total")
    calls = [service.send(one) for _ in range(number)]
    service.check(record, service.collect(record, calls, "OK"))
    shared = service.server.metric("ec_producer_items_shared_total") - before
    record.expect(shared == number - 1, f"{shared:.0f} of {number} shared the encode of one")
    service.check_settled(record)


def releases(service: Service, record: Record, scale: float) -> None:
    """Releases twice and in any order: each lease ends once, and no other one with it."""
    (one,) = service.new_pictures(1)
    tickets = service.collect(record, [service.send(one) for _ in range(max(10, int(50 * scale)))], "OK")
    kept = tickets.pop()
    ids = [ticket.lease_id for _, ticket in tickets] * 3 + ["0" * 32, "", "x" * 5000]
    random.shuffle(ids)
    stub = service.clients[1].stub
    ended = [stub.Release(pb.ReleaseRequest(lease_id=one), timeout=CALL_S).released for one in ids]
    record.expect(sum(ended) == len(tickets), f"{len(tickets)} leases, {sum(ended)} releases")
    record.expect(service.server.metric("ec_producer_pool_leases") == 1, "the lease that was kept has ended, too")
    service.check(record, [kept])
    service.check_settled(record)


def never_released(service: Service, record: Record, scale: float) -> None:
    """A consumer that keeps its leases fills the pool: refused with a time to come back, until they have expired."""
    tickets = []
    deadline_s = time.monotonic() + CALL_S
    while time.monotonic() < deadline_s and not record.outcomes["RESOURCE_EXHAUSTED"]:
        call = service.send(*service.new_pictures(QUEUE_ITEMS // 2, SIDE))
        tickets += service.collect(record, [call], "OK", "RESOURCE_EXHAUSTED")
        for refused in (one for one in call.outcomes() or [] if isinstance(one, ProducerError)):
            record.expect(refused.reason == Reason.POOL_FULL, f"refused for {refused.reason}")
            record.expect(refused.retry_delay_s > 0, "POOL_FULL without RetryInfo")
    record.expect(record.outcomes["RESOURCE_EXHAUSTED"] > 0, f"a pool of {POOL_BYTES} bytes was never full")
    service.check(record, tickets[:1])  # what is leased is still there
    service.check_settled(record, EXPIRY_S)
    service.check_works(record)


def streams_that_leave(service: Service, record: Record, scale: float) -> None:
    """EncodeStream clients that cancel, half-close or lose their connection on the way."""
    for turn in range(max(4, int(20 * scale))):
        record.tried += 1
        channel, stub = service.raw_stub()
        with channel:
            pictures = service.new_pictures(6)
            requests = (pb.EncodeStreamRequest(id=i, item=image(one)) for i, one in enumerate(pictures))
            call = stub.EncodeStream(_dripping(requests), timeout=CALL_S)
            try:
                for _ in range(turn % 6):
                    response = next(call)
                    service.check(record, [(pictures[response.id], response.outcome.ticket)])
            except grpc.RpcError as error:
                record.expect(error.code().name == "RESOURCE_EXHAUSTED", f"a stream ended with {error.code().name}")
            if turn % 2:
                call.cancel()
        record.ended("LEFT")
    service.check_settled(record, EXPIRY_S)


def _dripping(requests: Iterator[pb.EncodeStreamRequest]) -> Iterator[pb.EncodeStreamRequest]:
    for request in requests:
        time.sleep(random.uniform(0, 0.01))
        yield request


def slow_readers(service: Service, record: Record, scale: float) -> None:
    """Fetches that nobody reads hold nobody else up, and pin nothing for good though they go on."""
    (one,) = service.new_pictures(1, SIDE)
    ((_, ticket),) = service.collect(record, [service.send(one)], "OK")
    channel, stub = service.raw_stub()
    with channel:
        request = pb.FetchRequest(lease_id=ticket.lease_id)
        fetches = [stub.Fetch(request, timeout=CALL_S) for _ in range(max(20, int(200 * scale)))]
        for _ in range(5):
            service.check(record, service.collect(record, [service.send(*service.new_pictures(2))], "OK"))
        service.check(record, [(one, ticket)])
        service.check_settled(record, EXPIRY_S)
        for fetch in fetches:
            fetch.cancel()


def malformed(service: Service, record: Record, scale: float) -> None:
    """Requests that are too large, or none at all: refused by name, and the next one is served."""
    noise = [random.Random(seed).randbytes(100) for seed in range(10)]
    for _ in range(max(1, int(3 * scale))):
        for what, method, request in _malformed(image(service.new_pictures(1)[0])):
            _refused(service, record, f"{what}, {method}", method, request.SerializeToString(), *_BY_NAME)
        for one in noise:  # by gRPC itself, where it cannot be parsed
            _refused(
                service, record, "noise", random.choice(["Encode", "Acquire"]), one, *_BY_NAME, "INTERNAL", "UNKNOWN"
            )
        _refused(service, record, "no such method", "Nothing", b"", "UNIMPLEMENTED")
    service.check_works(record)
    service.check_settled(record)


_BY_NAME = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "RESOURCE_EXHAUSTED")


def _malformed(item: pb.MediaItem) -> Iterator[tuple[str, str, Message]]:
    big, decoded = image(bytes(ITEM_BYTES + 1)), pb.DecodedMedia(shape=[2**32 - 1] * 3, data=b"1")
    items = {
        "no items": [],
        "too many items": [item] * (QUEUE_ITEMS + 1),
        "too large an item": [big],
        "too large a request": [image(bytes(ITEM_BYTES))] * 4,
        "just above the limit": [*([image(bytes(ITEM_BYTES - 1000))] * 2), image(bytes(3000))],
        "no modality": [pb.MediaItem(data=b"1")],
        "no content": [pb.MediaItem(modality=pb.MODALITY_IMAGE)],
        "an absurd shape": [pb.MediaItem(modality=pb.MODALITY_IMAGE, decoded=decoded)],
    }
    yield from ((what, "Encode", pb.EncodeRequest(items=several)) for what, several in items.items())
    yield "another fingerprint", "Encode", pb.EncodeRequest(items=[item], fingerprint="f" * 64)
    yield "other settings", "Encode", pb.EncodeRequest(items=[item], settings={"mm_processor_kwargs": "[" * 10_000})
    yield "an old epoch", "Acquire", pb.AcquireRequest(epoch="0" * 16, transport="grpc", wire_version=WIRE_VERSION)
    yield "nothing", "Acquire", pb.AcquireRequest()
    yield "no lease", "Fetch", pb.FetchRequest(lease_id="0" * 32)


def _refused(service: Service, record: Record, what: str, method: str, request: bytes, *allowed: str) -> None:
    """One call; its code, or that of its only item, must be one of the allowed."""
    record.tried += 1
    channel, _ = service.raw_stub()
    with channel:
        call: Callable[..., bytes] = channel.unary_unary(f"/{SERVICE_NAME}/{method}")
        try:
            response = pb.EncodeResponse.FromString(call(request, timeout=CALL_S))
            code = ", ".join({code_of(outcome) for outcome in outcomes(response)})
        except grpc.RpcError as error:
            code = error.code().name
    record.ended(code)
    record.expect(code in allowed, f"{what}: {code}")


def soak(service: Service, record: Record, scale: float) -> None:
    """The same work over and over: files, threads and memory of the service stop growing."""
    middle = Usage.of(service.pid)
    for half in range(2):
        for _ in range(int(20 * scale) + 10):
            calls = [service.send(*service.new_pictures(4)) for _ in range(4)]
            service.check(record, service.collect(record, calls, "OK", "RESOURCE_EXHAUSTED"))
        middle = middle if half else Usage.of(service.pid)
    middle.grown(Usage.of(service.pid), record, "the service")
    service.check_settled(record)


CASES = (
    overload,
    closed_loop,
    many_items,
    deadlines,
    cancellations,
    same_item,
    releases,
    never_released,
    streams_that_leave,
    slow_readers,
    malformed,
    soak,
)
