"""Calls to one producer: encode media, acquire, fetch and release embeddings. Plain gRPC underneath."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import grpc

from consumer_shim import metrics
from consumer_shim.balancer import Health
from consumer_shim.channel import PLAIN, ChannelSecurity, aio_channel, sync_channel
from consumer_shim.errors import ProducerError as ProducerError
from consumer_shim.fingerprint import FingerprintPin
from consumer_shim.releases import Releases
from consumer_shim.retries import MAX_ATTEMPTS, Attempts
from consumer_shim.tickets import PullTicket
from producer.transport.base import BlockDescriptor
from producer.wire.block import read_block
from producer.wire.contract import GRPC_TRANSPORT, WIRE_VERSION
from producer.wire.origin import current
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheStub
from producer.wire.tracing import Tracing, span

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
)
"""No retry policy: with one, a pull whose producer was killed was seen to end by its deadline only.

Between two tries to connect, calls fail with what the last one met. The pause is shorter than the waits of an Encode's
attempts together, so that one of them meets what there is now.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A lease from Acquire: the block's descriptor and the seconds it lasts, counted from the request."""

    block: BlockDescriptor
    ttl_s: float


class Producer:
    """One producer over one channel; every call has a deadline. Thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        security: ChannelSecurity = PLAIN,
        pin: FingerprintPin | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """A channel to `address` (host:port); it connects at the first call. Without `pin`, any model will do.

        Raises:
            CredentialFileError: a file of `security` cannot be used.
        """
        self.address = address
        self._pin = pin or FingerprintPin()
        self._tracing = tracing
        self._channel = sync_channel(address, security, CHANNEL_OPTIONS)
        self.stub = EncoderCacheStub(self._channel)

    def info(self, timeout_s: float) -> pb.GetModelInfoResponse:
        """What the producer serves.

        Raises:
            ProducerError: it does not answer.
        """
        with _producer_errors():
            return self.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s, metadata=current().headers())

    def encode(
        self, items: Sequence[pb.MediaItem], timeout_s: float, *, settings: Mapping[str, Any] | None = None
    ) -> list[pb.Ticket | ProducerError]:
        """One outcome an item, in order. What had no room, or reached nobody, is sent again within the time.

        Args:
            items: what to encode.
            timeout_s: seconds for all of it.
            settings: `mm_processor_kwargs` and `media_io_kwargs` that the producer must have; not compared by default.

        Raises:
            ProducerError: the call as a whole failed.
        """
        attempts = Attempts(items, timeout_s)
        while True:
            try:
                with _encode_call(self._tracing, self.address, attempts):
                    request = _request(attempts.items, settings, self._pin)
                    response = self.stub.Encode(request, timeout=attempts.left_s, metadata=current().headers())
                    self._pin.check(response.fingerprint)
            except ProducerError as error:
                delay_s = attempts.failed(error)
            else:
                delay_s = attempts.take(outcomes(response))
            if delay_s is None:
                return attempts.outcomes
            time.sleep(delay_s)

    def encode_stream(
        self, items: Iterable[pb.MediaItem], timeout_s: float
    ) -> Iterator[tuple[int, pb.Ticket | ProducerError]]:
        """Sends `items` as they come and yields the outcome of each when it is done, with the item's place in `items`.

        Raises:
            ProducerError: the call as a whole failed.
        """
        requests = (pb.EncodeStreamRequest(id=index, item=item) for index, item in enumerate(items))
        with _producer_errors():
            call = self.stub.EncodeStream(requests, timeout=timeout_s, metadata=current().headers())
            for response in call:
                yield response.id, _outcome(response.outcome)

    def acquire(self, *, key: str, epoch: str, lease_id: str, transport: str, timeout_s: float) -> Lease:
        """A lease on the embedding of a ticket, and its descriptor for `transport`.

        Raises:
            ProducerError: it has gone, or the call failed.
        """
        request = pb.AcquireRequest(
            key=key,
            epoch=epoch,
            lease_id=lease_id,
            transport=transport,
            wire_version=WIRE_VERSION,
            fingerprint=self._pin.expected,
        )
        with _producer_errors():
            response = self.stub.Acquire(request, timeout=timeout_s, metadata=current().headers())
        found = response.descriptor
        block = BlockDescriptor(
            transport=found.transport,
            lease_id=response.lease_id,
            address=found.address,
            num_bytes=found.length,
            generation=found.generation,
            peer=found.peer,
            peer_metadata=found.peer_metadata,
        )
        return Lease(block=block, ttl_s=response.lease_ttl.seconds + response.lease_ttl.nanos / 1e9)

    def fetch(self, ticket: pb.Ticket, timeout_s: float) -> bytes:
        """The rows of a ticket's embedding as bytes, checked; its lease is released.

        Raises:
            ProducerError: it has gone, or the call failed.
            BlockError: what came is not what the ticket promised.
        """
        expected = PullTicket.from_message(ticket, self.address)
        lease = self.acquire(
            key=ticket.key, epoch=ticket.epoch, lease_id=ticket.lease_id, transport=GRPC_TRANSPORT, timeout_s=timeout_s
        )
        try:
            block = self._fetch(lease.block.lease_id, expected.shape.block_bytes, timeout_s)
        finally:
            self.release(lease.block.lease_id, timeout_s)
        return bytes(read_block(memoryview(block), expected.identity(lease.block.generation), expected.shape))

    def release(self, lease_id: str, timeout_s: float) -> None:
        """Ends a lease, if the producer can be reached; else it ends by expiry."""
        with contextlib.suppress(ProducerError), _producer_errors():
            request = pb.ReleaseRequest(lease_id=lease_id)
            self.stub.Release(request, timeout=timeout_s, metadata=current().headers())

    def open_fetch(self, request: pb.FetchRequest, timeout: float) -> Any:
        """The call of `Fetch`, as the stub's."""
        return self.stub.Fetch(request, timeout=timeout, metadata=current().headers())

    def close(self) -> None:
        """Ends the channel; calls in flight fail."""
        self._channel.close()

    def _fetch(self, lease_id: str, num_bytes: int, timeout_s: float) -> bytearray:
        """The bytes of a leased block; those of a longer one break off behind `num_bytes`."""
        block = bytearray()
        with _producer_errors():
            call = self.open_fetch(pb.FetchRequest(lease_id=lease_id), timeout_s)
            for part in call:
                block += part.data
                if len(block) > num_bytes:
                    call.cancel()
                    break
        return block


@contextlib.contextmanager
def _producer_errors() -> Iterator[None]:
    """Turns what gRPC raises in the body into ProducerError."""
    try:
        yield
    except grpc.RpcError as error:
        raise ProducerError.from_call(error) from None
    except (ValueError, grpc.aio.UsageError):  # how gRPC says that the channel was closed
        raise ProducerError(grpc.StatusCode.CANCELLED, "", "the client is closed") from None


@contextlib.contextmanager
def _encode_call(tracing: Tracing | None, address: str, attempts: Attempts) -> Iterator[None]:
    """As `_producer_errors`, for one call of Encode, which has a span of its own and is counted."""
    since_s, code = perf_counter(), grpc.StatusCode.CANCELLED  # unless it ends by itself
    with span(tracing, "encode", kind="client", address=address, items=len(attempts.items)) as traced:
        try:
            with _producer_errors():
                yield
            code = grpc.StatusCode.OK
        except ProducerError as error:
            code = error.code
            if traced is not None:
                traced.set(code=error.code.name, reason=error.reason)
            raise
        finally:
            metrics.count_encode(code.name, perf_counter() - since_s)


class AsyncProducer:
    """As `Producer`, for the event loop that makes it: what a server needs to have media encoded."""

    def __init__(
        self,
        address: str,
        *,
        security: ChannelSecurity = PLAIN,
        pin: FingerprintPin | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """As `Producer`."""
        self.address = address
        self.health = Health()
        self._pin = pin or FingerprintPin()
        self._tracing = tracing
        self._channel = aio_channel(address, security, CHANNEL_OPTIONS)
        self._stub: Any = EncoderCacheStub(self._channel)
        self._releases = Releases(self._release)

    async def encode(
        self,
        items: Sequence[pb.MediaItem],
        timeout_s: float,
        *,
        settings: Mapping[str, Any] | None = None,
        most_attempts: int = MAX_ATTEMPTS,
        is_again: bool = False,
    ) -> list[pb.Ticket | ProducerError]:
        """As `Producer.encode`, in at most `most_attempts`; `is_again` where the items were at another producer."""
        attempts = Attempts(items, timeout_s, most=most_attempts, is_again=is_again)
        while True:
            try:
                with _encode_call(self._tracing, self.address, attempts):
                    request = _request(attempts.items, settings, self._pin)
                    metadata = current().headers()
                    response = await self._stub.Encode(request, timeout=attempts.left_s, metadata=metadata)
                    self._pin.check(response.fingerprint)
            except ProducerError as error:
                delay_s = attempts.failed(error)
            else:
                delay_s = attempts.take(outcomes(response))
            if delay_s is None:
                return attempts.outcomes
            await asyncio.sleep(delay_s)

    async def release(self, lease_id: str, timeout_s: float) -> None:
        """As `Producer.release`; leases that are released at about the same time share a call."""
        await self._releases.add(lease_id, timeout_s)

    async def close(self) -> None:
        """Ends the channel; calls in flight fail."""
        await self._channel.close()

    async def _release(self, request: pb.ReleaseRequest, timeout_s: float) -> None:
        with contextlib.suppress(ProducerError), _producer_errors():
            await self._stub.Release(request, timeout=timeout_s, metadata=current().headers())


def _request(
    items: Sequence[pb.MediaItem], settings: Mapping[str, Any] | None, pin: FingerprintPin
) -> pb.EncodeRequest:
    expected = {name: json.dumps(value or {}) for name, value in (settings or {}).items()}
    return pb.EncodeRequest(items=items, settings=expected, fingerprint=pin.expected, wire_version=WIRE_VERSION)


def outcomes(response: pb.EncodeResponse) -> list[pb.Ticket | ProducerError]:
    """Ticket or error of each item, in order."""
    return [_outcome(outcome) for outcome in response.outcomes]


def _outcome(outcome: pb.ItemOutcome) -> pb.Ticket | ProducerError:
    return outcome.ticket if outcome.WhichOneof("outcome") == "ticket" else ProducerError.from_status(outcome.error)
