"""The gRPC service: messages in, messages out. No logic of its own."""

import asyncio
import functools
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any

import grpc

from producer import call_notes
from producer.admission import Admission
from producer.clients import Clients
from producer.core import Lease, MediaItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    MismatchError,
    OverloadedError,
    ServiceError,
    UnavailableError,
)
from producer.item_stream import ItemStream
from producer.messages import abort, duration, error_status, media_item, status_code, ticket
from producer.metrics import Metrics
from producer.recent_errors import RecentErrors
from producer.security import client_of
from producer.transport.base import Outlet, TransportError
from producer.wire.contract import FETCH_CHUNK_BYTES, MAX_MORE_LEASES, WIRE_VERSION, Reason
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheServicer

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_OK, _CANCELLED = grpc.StatusCode.OK.name, grpc.StatusCode.CANCELLED.name


class Servicer(EncoderCacheServicer):
    """Answers for one producer. `info` is what GetModelInfo says; it names the limits that are checked here."""

    def __init__(
        self,
        admission: Admission,
        pool: EmbeddingPool,
        outlets: Mapping[str, Outlet],
        info: pb.GetModelInfoResponse,
        metrics: Metrics,
        *,
        settings: Mapping[str, Any],
        errors: RecentErrors | None = None,
        max_streams: int = 64,
        stream_idle_s: float = 300.0,
    ) -> None:
        """`settings` are compared with those that a client expects; `errors` remembers what was refused; `max_streams`
        EncodeStreams may be open at once, and end after `stream_idle_s` without a request.
        """
        self._admission = admission
        self._pool = pool
        self._outlets = outlets
        self._info = info
        self._metrics = metrics
        self._settings = settings
        self._errors = errors or RecentErrors()
        self._stream_idle_s = stream_idle_s
        self._streams = asyncio.Semaphore(max_streams)
        self._clients = Clients(info.limits.max_client_items)
        self._items = functools.cache(lambda code: metrics.items.labels(code))

    async def Encode(self, request: pb.EncodeRequest, context: Context) -> pb.EncodeResponse:
        items = [media_item(item) for item in request.items]  # each access to a field copies its bytes
        try:
            self._check(request, items)
        except ServiceError as error:
            await self._abort(context, error)
        leases: list[Lease] = []
        deadline_s, client = _deadline_s(context), client_of(context)
        encoding = [
            self._encode(index, item, leases, deadline_s=deadline_s, client=client) for index, item in enumerate(items)
        ]
        try:  # one item, the most frequent number, needs no task of its own
            outcomes = [await encoding[0]] if len(encoding) == 1 else await asyncio.gather(*encoding)
        except asyncio.CancelledError:
            for lease in leases:  # nobody will ever hear of them
                self._pool.release(lease.lease_id)
            raise
        return pb.EncodeResponse(outcomes=outcomes, fingerprint=self._info.fingerprint)

    async def EncodeStream(
        self, request_iterator: AsyncIterator[pb.EncodeStreamRequest], context: Context
    ) -> AsyncIterator[pb.EncodeStreamResponse]:
        if self._streams.locked():
            await self._abort(context, OverloadedError(Reason.TOO_MANY_STREAMS, "as many streams as allowed are open"))
        deadline_s, client = _deadline_s(context), client_of(context)

        def encode(index: int, item: pb.MediaItem, leases: list[Lease]) -> Awaitable[pb.ItemOutcome]:
            return self._encode(index, media_item(item), leases, deadline_s=deadline_s, client=client)

        stream = ItemStream(encode, self._info.limits.max_items_per_request, idle_s=self._stream_idle_s)
        async with self._streams:
            reading = asyncio.create_task(stream.read(request_iterator))
            try:
                async for response in stream.responses():
                    yield response
            finally:
                reading.cancel()
                for lease in stream.abandon():
                    self._pool.release(lease.lease_id)
        if stream.was_idle:
            idle = f"nothing came for {self._stream_idle_s:.0f} s"
            await self._abort(context, DeadlineError(Reason.STREAM_IDLE, idle))

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        try:
            return self._acquire(request)
        except ServiceError as error:
            await self._abort(context, error)
            raise

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        more = list(request.lease_ids)
        if len(more) > MAX_MORE_LEASES:
            sentence = f"the request has {len(more)} lease_ids; allowed are at most {MAX_MORE_LEASES}"
            await self._abort(context, InvalidRequestError(Reason.MALFORMED_REQUEST, sentence))
        leases = [self._pool.release(lease_id) for lease_id in (request.lease_id, *more)]
        for lease in leases:
            if lease is not None and lease.transport:
                self._metrics.count_pull(lease.transport, lease.num_bytes, self._pool.held_s(lease))
                call_notes.add(transport=lease.transport, key=lease.key[:16])
        return pb.ReleaseResponse(released=None not in leases)

    async def Fetch(  # type: ignore[override]  # not a generator: one that is not read on could not be timed out
        self, request: pb.FetchRequest, context: Context
    ) -> None:
        """For as long as a lease lasts at most: a reader that does not read on may not pin its block for ever."""
        try:
            with self._pool.open_block(request.lease_id) as block:
                await asyncio.wait_for(_send(block, context), self._pool.lease_s)
        except asyncio.TimeoutError:
            await self._abort(
                context, DeadlineError(Reason.FETCH_TOO_SLOW, f"the block was not read in {self._pool.lease_s:.0f} s")
            )
        except ServiceError as error:
            await self._abort(context, error)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return self._info

    def _check(self, request: pb.EncodeRequest, items: Sequence[MediaItem]) -> None:
        self._check_fit(request.wire_version or WIRE_VERSION, request.fingerprint)
        limits = self._info.limits
        most = limits.max_items_per_request
        if not 1 <= len(items) <= most:
            raise InvalidRequestError(
                Reason.MALFORMED_REQUEST, f"the request has {len(items)} items; allowed are 1 to {most}"
            )
        num_bytes = sum(len(item.data) for item in items)
        if num_bytes > limits.max_request_bytes:
            raise InvalidRequestError(
                Reason.REQUEST_TOO_LARGE,
                f"the request's items have {num_bytes} bytes; at most {limits.max_request_bytes} are allowed",
            )
        for name, expected in request.settings.items():
            own = json.dumps(self._settings.get(name, {}), sort_keys=True)
            if _canonical(expected) != own:
                raise MismatchError(
                    Reason.SETTINGS_MISMATCH,
                    f"{name[:64]} is {own[:200]} at the encoder service and {expected[:200]} at its client",
                )

    def _check_fit(self, wire_version: int, fingerprint: str) -> None:
        """Refuses who knows another wire version, or expects another model than the one here."""
        if wire_version != WIRE_VERSION:
            raise MismatchError(
                Reason.WIRE_VERSION_MISMATCH,
                f"the client knows wire version {wire_version}, this producer has {WIRE_VERSION}",
            )
        if fingerprint not in ("", self._info.fingerprint):
            raise MismatchError(
                Reason.FINGERPRINT_MISMATCH,
                f"the client expects fingerprint {fingerprint[:64]}, this one is {self._info.fingerprint}",
            )

    async def _encode(
        self, index: int, item: MediaItem, leases: list[Lease], *, deadline_s: float, client: str
    ) -> pb.ItemOutcome:
        """The one outcome of an item; its lease, if it has one, goes into `leases` too."""
        try:
            with self._clients.permit(client):
                lease = await self._admission.encode(item, deadline_s)
        except asyncio.CancelledError:
            self._items(_CANCELLED).inc()
            raise
        except ServiceError as error:
            return self._failed(index, error)
        except Exception as error:  # an item's error must not void the others
            logger.exception("an item failed")
            reason = f"encoding failed: {type(error).__name__}"
            return self._failed(index, InternalError(Reason.ENCODE_FAILED, reason))
        leases.append(lease)
        self._items(_OK).inc()
        call_notes.count(_OK)
        return pb.ItemOutcome(ticket=self._ticket(lease))

    def _failed(self, index: int, error: ServiceError) -> pb.ItemOutcome:
        code = status_code(error).name
        self._items(code).inc()
        self._errors.add("item", code, error.reason.value)
        call_notes.count(f"{code} {error.reason.value}")
        return pb.ItemOutcome(error=error_status(error, index))

    async def _abort(self, context: Context, error: ServiceError) -> None:
        """Ends a call with an error; raises."""
        self._errors.add("call", status_code(error).name, error.reason.value)
        await abort(context, error)

    def _ticket(self, lease: Lease) -> pb.Ticket:
        return ticket(lease, epoch=self._info.epoch, lease_s=self._pool.lease_s, address=self._info.address)

    def _acquire(self, request: pb.AcquireRequest) -> pb.AcquireResponse:
        self._check_fit(request.wire_version, request.fingerprint)
        if request.epoch != self._info.epoch:
            raise MismatchError(
                Reason.EPOCH_MISMATCH,
                f"the ticket is of epoch {request.epoch[:16]}, not {self._info.epoch}: the producer was started again",
            )
        outlet = self._outlets.get(request.transport)
        if outlet is None:
            offered = ", ".join(self._outlets)
            raise InvalidRequestError(
                Reason.UNKNOWN_TRANSPORT,
                f"transport {request.transport[:64]!r} is not offered here; {offered} are",
                field="transport",
            )
        try:
            endpoint = outlet.describe()  # before the ticket's lease is replaced
        except TransportError as error:
            self._metrics.pull_failures.labels(outlet.name).inc()
            raise UnavailableError(Reason.TRANSPORT_DOWN, f"{outlet.name} is down: {error}") from None
        lease = self._pool.grant(request.key, outlet.name, replaces=request.lease_id)
        call_notes.add(transport=outlet.name, rows=lease.info.shape.num_rows, key=lease.key[:16])
        descriptor = pb.Descriptor(
            transport=outlet.name,
            address=0 if endpoint.base is None else endpoint.base + lease.offset,
            length=lease.num_bytes,
            generation=lease.generation,
            peer=endpoint.peer,
            peer_metadata=endpoint.metadata,
        )
        return pb.AcquireResponse(
            lease_id=lease.lease_id, lease_ttl=duration(self._pool.lease_s), descriptor=descriptor
        )


async def _send(block: memoryview, context: Context) -> None:
    for start in range(0, block.nbytes, FETCH_CHUNK_BYTES):
        await context.write(pb.FetchResponse(data=bytes(block[start : start + FETCH_CHUNK_BYTES])))


def _deadline_s(context: Context) -> float:
    """When the call's client gives up, on the event loop's clock."""
    left_s = context.time_remaining()
    return math.inf if left_s is None else asyncio.get_running_loop().time() + left_s


def _canonical(text: str) -> str:
    """JSON in the form in which equal values are equal text; other text as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text
