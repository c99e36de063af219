"""An embedding that is lost between its encode and its pull is encoded again, once, and the client sees an answer."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import (
    EncoderCacheServicer,
    EncoderCacheStub,
    add_EncoderCacheServicer_to_server,
)
from tests.e2e.conftest import Servers
from tests.kit.chat import ChatError, ask, chat_request
from tests.kit.photos import photos
from tests.kit.ports import free_port
from tests.kit.servers import VllmServer, consumer_args
from tests.kit.stack import Stack

pytestmark = pytest.mark.e2e


class Restarting(EncoderCacheServicer):
    """Passes all on to a real producer. The next `num_lost` answers have an epoch that is over, as if the producer was
    started again before the pull; a real restart cannot be timed so. It does not reproduce the time that one takes."""

    def __init__(self, stub: EncoderCacheStub) -> None:
        self._stub = stub
        self.num_lost = 0
        self.num_encodes = 0

    def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        response: pb.EncodeResponse = self._stub.Encode(request, timeout=60)
        self.num_encodes += 1
        if self.num_lost:
            self.num_lost -= 1
            for outcome in response.outcomes:
                outcome.ticket.epoch = "0" * 16
        return response

    def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.AcquireResponse:
        try:
            response: pb.AcquireResponse = self._stub.Acquire(request, timeout=60)
        except grpc.RpcError as error:
            context.abort_with_status(_Status(error))
        return response

    def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        response: pb.ReleaseResponse = self._stub.Release(request, timeout=60)
        return response

    def Fetch(self, request: pb.FetchRequest, context: Any) -> Iterator[pb.FetchResponse]:
        yield from self._stub.Fetch(request, timeout=60)


class _Status(grpc.Status):
    """The status of a call that failed, details and all."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.code = error.code()
        self.details = error.details()
        self.trailing_metadata = error.trailing_metadata()


@pytest.fixture(scope="module")
def restarting(servers: Servers) -> Iterator[tuple[Restarting, str]]:
    address = f"127.0.0.1:{free_port()}"
    with grpc.insecure_channel(servers.producer.address) as channel:
        servicer = Restarting(EncoderCacheStub(channel))
        server = grpc.server(ThreadPoolExecutor(8))
        add_EncoderCacheServicer_to_server(servicer, server)
        server.add_insecure_port(address)
        server.start()
        yield servicer, address
        server.stop(1).wait()


@pytest.fixture(scope="module")
def llm_only(model: Path, stack: Stack, restarting: tuple[Restarting, str]) -> Iterator[VllmServer]:
    server = VllmServer(model, extra_args=consumer_args(restarting[1], "grpc"), name="e2e-lost")
    stack.start(server)
    stack.wait_ready(print)
    yield server
    stack.stop(server)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_lost_embedding_is_encoded_again(
    servers: Servers, restarting: tuple[Restarting, str], llm_only: VllmServer, stream: bool
) -> None:
    servicer, _ = restarting
    before = servicer.num_encodes
    servicer.num_lost = 1
    picture = photos()["coffee.jpg" if stream else "coffee.png"]
    request = chat_request([picture, photos()["rocket.jpg"], "What are they?"], stream=stream)
    again = llm_only.metric("ec_producer_shim_reencodes_total")
    refused = llm_only.metric("ec_producer_shim_pulls_total", outcome="refused", transport="grpc")
    assert ask(llm_only.url, request) == ask(servers.plain.url, request)
    assert servicer.num_encodes == before + 2
    assert llm_only.metric("ec_producer_shim_reencodes_total") == again + 1
    assert llm_only.metric("ec_producer_shim_encodes_total") == servicer.num_encodes
    least = refused + 1
    refused = llm_only.metric_reaching(least, "ec_producer_shim_pulls_total", outcome="refused", transport="grpc")
    assert refused >= least


def test_an_embedding_that_is_lost_twice_is_told(restarting: tuple[Restarting, str], llm_only: VllmServer) -> None:
    servicer, _ = restarting
    servicer.num_lost = 2
    with pytest.raises(ChatError, match="EPOCH_MISMATCH") as told:
        ask(llm_only.url, chat_request([photos()["chelsea.jpg"], "Who is it?"]))
    assert told.value.status == 503
    assert servicer.num_lost == 0
