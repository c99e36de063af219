"""Several client processes share a load; what one of them meets is not lost."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from bench import ours
from bench.gpu_clients import Clients, ClientsError
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb import encoder_cache_pb2_grpc as pb_grpc

ANSWER_S = 0.02


class Producer(pb_grpc.EncoderCacheServicer):
    """Answers after a while, or refuses what says so; encodes nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.images: list[bytes] = []
        self.released: list[str] = []
        self.in_hand = self.most_in_hand = 0

    def Encode(self, request, context):  # type: ignore[no-untyped-def]
        (item,) = request.items
        with self.lock:
            self.in_hand += 1
            self.most_in_hand = max(self.most_in_hand, self.in_hand)
        time.sleep(ANSWER_S)
        with self.lock:
            self.in_hand -= 1
            self.images.append(item.data)
        outcome = pb.ItemOutcome(ticket=pb.Ticket(lease_id=f"{len(self.images):032x}"))
        if item.data == b"bad":
            outcome = pb.ItemOutcome()
            outcome.error.message = "the queue is full"
        return pb.EncodeResponse(outcomes=[outcome])

    def Release(self, request, context):  # type: ignore[no-untyped-def]
        with self.lock:
            self.released += [request.lease_id, *request.lease_ids]
        return pb.ReleaseResponse(released=True)


@pytest.fixture
def producer() -> Iterator[tuple[Producer, str]]:
    servicer = Producer()
    server = grpc.server(ThreadPoolExecutor(16))
    pb_grpc.add_EncoderCacheServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


def test_each_request_is_sent_once_and_no_more_are_in_flight_than_asked_for(producer: tuple[Producer, str]) -> None:
    servicer, address = producer
    images = [b"%d" % number for number in range(30)]
    with Clients(2) as clients:
        found = clients.load("grpc", address, [ours.request(image) for image in images], 6, 5)
        again = clients.load("grpc", address, [ours.request(b"x")] * 3, 0, 1)
    assert sorted(servicer.images) == sorted([*images, b"x", b"x", b"x"])
    assert len(servicer.released) == 33
    assert 1 < servicer.most_in_hand <= 5
    assert (len(found.latencies_s), found.num_processes) == (24, 2)
    assert (len(again.latencies_s), again.num_processes) == (3, 1)
    assert found.latencies_s[0] >= ANSWER_S
    assert found.seconds >= 24 / 5 * ANSWER_S, "all five in flight answered sooner than the server can"
    figures = found.figures()
    assert figures["throughput"] == pytest.approx(24 / found.seconds)
    assert found.latencies_s[0] * 1000 <= figures["p50_ms"] <= figures["p99_ms"] == found.latencies_s[-1] * 1000


def test_a_request_that_fails_ends_the_load_with_its_reason(producer: tuple[Producer, str]) -> None:
    _, address = producer
    requests = [ours.request(image) for image in (b"1", b"2", b"bad", b"3")]
    with Clients(2) as clients, pytest.raises(ClientsError, match="the queue is full"):
        clients.load("grpc", address, requests, 0, 2)
    with Clients(2) as clients, pytest.raises(ClientsError, match="the queue is full"):
        clients.load("grpc", address, [ours.request(b"bad"), *requests[:2]], 1, 2)


def test_no_process_is_left() -> None:
    with Clients(2) as clients:
        processes = [process for process, _ in clients._processes]
        assert all(process.is_alive() for process in processes)
    assert not any(process.is_alive() for process in processes)
    with pytest.raises(ZeroDivisionError), Clients(1) as clients:
        raise ZeroDivisionError
    assert not clients._processes[0][0].is_alive()
