"""Our side: `ec-producer serve`, and clients that have pictures encoded over gRPC and give each lease back.

They give leases back as the asynchronous client of the shim does: those of about the same time by one call.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from bench.load import Send, Settle
from consumer_shim.releases import Releases
from producer.wire.contract import SERVICE_NAME
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.kit.processes import LOGS_DIR
from tests.kit.servers import ProducerServer

CALL_S = 60.0
Call = Callable[..., Awaitable[Any]]
OPTIONS = [("grpc.enable_http_proxy", 0)]


def server(
    model: Path,
    *,
    settings: Mapping[str, object] | None = None,
    transports: Sequence[str] = ("grpc",),
    env: Mapping[str, str] | None = None,
    logs: Path = LOGS_DIR,
) -> ProducerServer:
    """The producer, not started yet, with these fields of its settings (see `ServeConfig`)."""
    flags = [word for name, value in (settings or {}).items() for word in _flag(name, value)]
    return ProducerServer(model, transports=transports, extra_args=flags, env=env, name="bench-ours", logs=logs)


def _flag(name: str, value: object) -> list[str]:
    """As the command line has it: what is True is named only, and an object is JSON."""
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return [f"--{name.replace('_', '-')}", *([] if value is True else [text])]


def request(image: bytes) -> bytes:
    """The message that has `image` encoded. Made before the load: a client of another language makes it for nothing."""
    item = pb.MediaItem(modality=pb.MODALITY_IMAGE, data=image)
    return pb.EncodeRequest(items=[item]).SerializeToString()


@contextlib.asynccontextmanager
async def client(address: str) -> AsyncIterator[Send[bytes]]:
    """Sends what `request` makes; the answer is a ticket, whose lease is released."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        encode: Call = channel.unary_unary(
            f"/{SERVICE_NAME}/Encode", response_deserializer=pb.EncodeResponse.FromString
        )
        releases = _releases(channel)

        async def send(body: bytes) -> Settle:
            response = await encode(body, timeout=CALL_S)
            (outcome,) = response.outcomes
            return partial(releases.add, _lease_id(outcome), CALL_S)

        yield send


def stream_request(image: bytes) -> bytes:
    """As `request`, but for its number, which comes with the sending."""
    item = pb.MediaItem(modality=pb.MODALITY_IMAGE, data=image)
    return pb.EncodeStreamRequest(item=item).SerializeToString()


@contextlib.asynccontextmanager
async def stream_client(address: str) -> AsyncIterator[Send[bytes]]:
    """As `client`, for what `stream_request` makes: all over one EncodeStream, as one sends who has many."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        open_stream: Any = channel.stream_stream(
            f"/{SERVICE_NAME}/EncodeStream", response_deserializer=pb.EncodeStreamResponse.FromString
        )
        stream, releases = _Stream(open_stream()), _releases(channel)

        async def send(body: bytes) -> Settle:
            outcome = await asyncio.wait_for(stream.encode(body), CALL_S)
            return partial(releases.add, _lease_id(outcome), CALL_S)

        yield send
        await stream.close()


class _Stream:
    """The client's side of one EncodeStream. Answers come in any order."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[pb.ItemOutcome]] = {}
        self._is_free = asyncio.Lock()  # gRPC takes one message at a time
        self._reading = asyncio.create_task(self._read())

    async def encode(self, body: bytes) -> pb.ItemOutcome:
        number = next(self._numbers)
        answer: asyncio.Future[pb.ItemOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        async with self._is_free:
            await self._call.write(body + pb.EncodeStreamRequest(id=number).SerializeToString())
        return await answer

    async def close(self) -> None:
        await self._call.done_writing()
        await self._reading

    async def _read(self) -> None:
        error: Exception = ValueError("the producer ended the stream")
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._waiting.pop(response.id).set_result(response.outcome)
        except grpc.RpcError as found:
            error = found
        for answer in self._waiting.values():
            answer.set_exception(error)


def _releases(channel: grpc.aio.Channel) -> Releases:
    release: Call = channel.unary_unary(
        f"/{SERVICE_NAME}/Release", request_serializer=pb.ReleaseRequest.SerializeToString
    )

    async def send(leases: pb.ReleaseRequest, timeout_s: float) -> None:
        await release(leases, timeout=timeout_s)

    return Releases(send)


def _lease_id(outcome: pb.ItemOutcome) -> str:
    if outcome.WhichOneof("outcome") != "ticket":
        raise ValueError(f"the producer refuses: {outcome}")
    return outcome.ticket.lease_id


@contextlib.asynccontextmanager
async def trivial_client(address: str) -> AsyncIterator[Send[bytes]]:
    """Sends what `trivial_request` makes: the release of a lease that never was, which costs a call and little else."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        release: Call = channel.unary_unary(f"/{SERVICE_NAME}/Release")

        async def send(body: bytes) -> None:
            await release(body, timeout=CALL_S)

        yield send


def trivial_request() -> bytes:
    return pb.ReleaseRequest(lease_id="0" * 32).SerializeToString()
