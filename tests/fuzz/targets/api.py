"""Messages to the producer over gRPC, to its real service, admission and pool. The encoder gives rows of zeros."""

import asyncio
import json
from concurrent.futures import Future
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from producer.admission import Admission
from producer.core import EmbeddingInfo, MediaItem, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.memory.region import SharedRegion
from producer.messages import media_item
from producer.metrics import Metrics
from producer.server import Servicer
from producer.transport.stream import StreamOutlet
from producer.wire.block import EmbeddingShape
from producer.wire.content_key import content_key
from producer.wire.contract import GRPC_TRANSPORT, SERVICE_NAME, WIRE_VERSION
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import add_EncoderCacheServicer_to_server
from tests.fuzz.checks import check_said, expect
from tests.fuzz.mutate import message, with_kind
from tests.kit.steps import on_this_loop

_MAX_MESSAGE = 640
"""A difference of settings names both, in 200 characters each."""
_FINGERPRINT, _EPOCH = "12" * 32, "34" * 8
_SHAPE = EmbeddingShape(num_rows=1, width=8, dtype="float32")
_MAX_ITEMS, _MAX_ITEM_BYTES, _MAX_REQUEST_BYTES = 8, 512, 1024
_TIMEOUT_S = 30.0
_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
_LEASE = "the ticket's"
"""Stands in an input for a lease that there is."""


class _Service:
    """One producer without model and network."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pool = EmbeddingPool(
            SharedRegion.create("fuzz", 1 << 20), epoch=int(_EPOCH, 16), lease_s=60, max_leases=64
        )
        admission = Admission(
            self.pool,
            on_this_loop(self._prepare),
            self._submit,
            fingerprint=_FINGERPRINT,
            modalities=("image", "video", "audio"),
            max_queue_items=_MAX_ITEMS,
            max_item_bytes=_MAX_ITEM_BYTES,
            metrics=Metrics(),
        )
        info = pb.GetModelInfoResponse(fingerprint=_FINGERPRINT, epoch=_EPOCH)
        info.limits.max_items_per_request = _MAX_ITEMS
        info.limits.max_request_bytes = _MAX_REQUEST_BYTES
        info.limits.max_client_items = _MAX_ITEMS
        settings = {"mm_processor_kwargs": {}, "media_io_kwargs": {"video": {"num_frames": 8}}}
        servicer = Servicer(admission, self.pool, {GRPC_TRANSPORT: StreamOutlet()}, info, Metrics(), settings=settings)
        self.loop.run_until_complete(self._start(servicer))

    async def _start(self, servicer: Servicer) -> None:
        self._server = grpc.aio.server()
        add_EncoderCacheServicer_to_server(servicer, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    def unary(self, method: str, request: Message, response: Any) -> Any:
        """The answer to a call of one message."""
        return self.loop.run_until_complete(self._unary(method, request, response))

    async def _unary(self, method: str, request: Message, response: Any) -> Any:
        call = self._channel.unary_unary(f"/{SERVICE_NAME}/{method}", _bytes, response.FromString)
        return await call(request, timeout=_TIMEOUT_S)

    def stream(self, method: str, requests: list[Message], response: Any) -> list[Any]:
        """The answers to a call of several messages."""
        return self.loop.run_until_complete(self._stream(method, requests, response))  # type: ignore[no-any-return]

    async def _stream(self, method: str, requests: list[Message], response: Any) -> list[Any]:
        call = self._channel.stream_stream(f"/{SERVICE_NAME}/{method}", _bytes, response.FromString)
        return [one async for one in call(iter(requests), timeout=_TIMEOUT_S)]

    async def _prepare(self, key: str, item: MediaItem) -> PreparedItem:
        part = {"type": "image_embeds", "image_embeds": {}}
        return PreparedItem(key=key, modality=item.modality, num_rows=1, content_part=part, inputs=None)

    def _submit(self, item: PreparedItem) -> "Future[None]":
        info = EmbeddingInfo(modality=item.modality, shape=_SHAPE, content_part=item.content_part)
        self.pool.put(item.key, info, memoryview(bytes(_SHAPE.payload_bytes)))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _bytes(request: Message) -> bytes:
    return request.SerializeToString()


_service: Any = None


def _encode(request: pb.EncodeRequest) -> None:
    response = _service.unary("Encode", request, pb.EncodeResponse)
    expect(0 < len(request.items) <= _MAX_ITEMS, f"{len(request.items)} items are taken")
    expect(len(response.outcomes) == len(request.items), f"{len(response.outcomes)} outcomes")
    for index, outcome in enumerate(response.outcomes):
        _check_outcome(index, request.items[index], outcome)
    _check_keys(request, response)


def _check_outcome(index: int, item: pb.MediaItem, outcome: pb.ItemOutcome) -> None:
    if outcome.WhichOneof("outcome") == "ticket":
        num_bytes = len(item.data) + len(item.decoded.data)
        expect(0 < num_bytes <= _MAX_ITEM_BYTES, f"an item of {num_bytes} bytes is taken")
        expect(json.loads(outcome.ticket.content_part)["uuid"] == outcome.ticket.key, "a part goes by another name")
        return
    expect(outcome.error.code in (3, 8), f"an item ends with code {outcome.error.code}: {outcome.error.message}")
    _check_status(outcome.error, str(index))


def _check_keys(request: pb.EncodeRequest, response: pb.EncodeResponse) -> None:
    """Items have one key exactly where they are equal, also after another trip over the wire."""
    again = pb.EncodeRequest.FromString(request.SerializeToString())
    found: dict[str, MediaItem] = {}
    for item, outcome in zip(again.items, response.outcomes, strict=True):
        if outcome.WhichOneof("outcome") == "ticket":
            record = media_item(item)
            decoded = None if record.decoded is None else (record.decoded.shape, record.decoded.rate_hz)
            key = content_key(_FINGERPRINT, record.modality, record.data, decoded)
            expect(key == outcome.ticket.key, "the key is another after a round trip")
            expect(found.setdefault(key, record) == record, "items that differ share a key")
    expect(len({repr(record) + repr(record.data) for record in found.values()}) == len(found), "equal items differ")


def _stream(request: pb.EncodeStreamRequest) -> None:
    """One item, sent three times."""
    found = _service.stream("EncodeStream", [request] * 3, pb.EncodeStreamResponse)
    expect([one.id for one in found] == [request.id] * 3, "an item of a stream has no answer, or two")
    kinds = {one.outcome.WhichOneof("outcome") for one in found}
    expect(len(kinds) == 1 and None not in kinds, f"one item ends in {kinds}")


def _acquire(request: pb.AcquireRequest) -> None:
    if request.lease_id == _LEASE:
        request.lease_id = _ticket().lease_id
    before = _service.pool.num_leases
    response = _service.unary("Acquire", request, pb.AcquireResponse)
    expect(request.epoch == _EPOCH and request.wire_version == WIRE_VERSION, "another's ticket is taken")
    expect(request.transport == GRPC_TRANSPORT, f"transport {request.transport} is taken")
    expect(before <= _service.pool.num_leases <= before + 1, "a lease appeared or vanished")
    expect(response.descriptor.length == _SHAPE.block_bytes, "the block has another size")


def _fetch(request: pb.FetchRequest) -> None:
    if request.lease_id == _LEASE:
        request.lease_id = _ticket().lease_id
    found = _service.stream("Fetch", [request], pb.FetchResponse)
    expect(sum(len(part.data) for part in found) == _SHAPE.block_bytes, "the block has another size")


def _release(request: pb.ReleaseRequest) -> None:
    if request.lease_id == _LEASE:
        request.lease_id = _ticket().lease_id
    response = _service.unary("Release", request, pb.ReleaseResponse)
    expect(response.released is False or len(request.lease_id) == 32, "what was no lease is released")


def _ticket() -> pb.Ticket:
    """Of an item that is always there."""
    request = pb.EncodeRequest(items=[pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"a")])
    ticket: pb.Ticket = _service.unary("Encode", request, pb.EncodeResponse).outcomes[0].ticket
    return ticket


def _check_status(status: status_pb2.Status, index: str = "") -> None:
    """Code, sentence, and a stable reason with the item's index."""
    check_said(status.message, most=_MAX_MESSAGE)
    info = error_details_pb2.ErrorInfo()
    expect(status.details and status.details[0].Unpack(info) and info.reason, "an error has no reason")
    expect(info.metadata.get("item_index", "") == index, f"an error is of item {info.metadata}")


_KINDS: tuple[tuple[Any, Any], ...] = (
    (pb.EncodeRequest, _encode),
    (pb.EncodeStreamRequest, _stream),
    (pb.AcquireRequest, _acquire),
    (pb.FetchRequest, _fetch),
    (pb.ReleaseRequest, _release),
)


def target(data: bytes) -> None:
    """The call, then its message; every lease is released at the end."""
    global _service
    _service = _service or _Service()
    if not data:
        return
    kind, call = _KINDS[data[0] % len(_KINDS)]
    try:
        request = kind.FromString(data[1:])
    except DecodeError:
        return  # gRPC refuses it
    try:
        call(request)
    except grpc.aio.AioRpcError as error:
        details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
        expect(details is not None, f"a call ends with {error.code()}: {error.details()}")
        status = status_pb2.Status.FromString(details)
        expect(error.code() in _CODES, f"a call ends with {error.code()}: {error.details()}")
        expect((status.code, status.message) == (error.code().value[0], error.details()), "two accounts of an error")
        _check_status(status)
    for lease_id in list(_service.pool._leases):
        _service.pool.release(lease_id)


def _key(data: bytes) -> str:
    return content_key(_FINGERPRINT, "image", data)


_WORDS = (
    *(_FINGERPRINT, _EPOCH, _LEASE, _key(b"a"), "grpc", "shm", "mm_processor_kwargs", "media_io_kwargs", "{}", "null"),
    *('{"video": {"num_frames": 8}}', '{"video":{"num_frames":8.0}}', "[" * 990 + "]" * 990, "NaN", "/", "x" * 500),
)
mutate = with_kind(len(_KINDS), [message(kind, _WORDS) for kind, _ in _KINDS])


def seeds() -> dict[str, bytes]:
    image = pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"a")
    pixels = pb.DecodedMedia(shape=[1, 2, 3], data=b"abcdef")
    frames = pb.DecodedMedia(shape=[2, 1, 1, 3], data=b"abcdef", rate_hz=2.0)
    samples = pb.DecodedMedia(shape=[2], data=bytes(8), rate_hz=16000.0)
    decoded = [
        pb.MediaItem(modality=modality, decoded=one)
        for modality, one in zip((1, 2, 3), (pixels, frames, samples), strict=True)  # type: ignore[arg-type]
    ]
    settings = {"mm_processor_kwargs": "{}", "media_io_kwargs": '{"video": {"num_frames": 8}}'}
    acquire = pb.AcquireRequest(key=_key(b"a"), epoch=_EPOCH, lease_id=_LEASE, transport="grpc", wire_version=1)
    return {
        "files": b"\0" + pb.EncodeRequest(items=[image, image], settings=settings).SerializeToString(),
        "decoded": b"\0" + pb.EncodeRequest(items=decoded, fingerprint=_FINGERPRINT).SerializeToString(),
        "stream": b"\1" + pb.EncodeStreamRequest(id=7, item=image).SerializeToString(),
        "acquire": b"\2" + acquire.SerializeToString(),
        "fetch": b"\3" + pb.FetchRequest(lease_id=_LEASE).SerializeToString(),
        "release": b"\4" + pb.ReleaseRequest(lease_id=_LEASE).SerializeToString(),
    }
