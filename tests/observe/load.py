"""What clients ask of a producer, well and badly, so that every metric has something to say."""

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count

import grpc
import httpx

from consumer_shim.client import Producer, ProducerError
from consumer_shim.config import ShimConfig
from consumer_shim.landing import Landing
from consumer_shim.pull import Pull
from consumer_shim.tickets import PullTicket
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.kit.chat import ChatError, ask, chat_request
from tests.kit.clips import videos
from tests.kit.photos import Photo, photos
from tests.serving.service import image, picture, wait_for

CALL_S = 30.0
SIDES = (28, 56, 112, 168, 224)
"""Pixels: of 1 to 64 rows."""
NUM_KNOWN = 6
NUM_TOKENS = 4
REGION_BYTES = 8 << 20
SHORT_S = 0.003
"""Less than an encode takes."""
PAUSE_S = 0.2
LEASE_S = 3.0
"""What the producers' `--lease-s` has to be: a lease that is kept expires within the run."""
FAILURES = (AssertionError, ChatError, ProducerError, grpc.RpcError, httpx.HTTPError)
_numbers = count(1)


class Client:
    """One client of one producer."""

    def __init__(self, address: str, transport: str) -> None:
        """It pulls with the shim's own code over `transport`, which is opened here."""
        self._address = address
        self._producer = Producer(address)
        config = ShimConfig(producers=(address,), transport=transport, nixl_devices="lo", region_bytes=REGION_BYTES)
        self._landing = Landing(config)
        self._known = [picture(next(_numbers), SIDES[n % len(SIDES)]) for n in range(NUM_KNOWN)]

    def close(self) -> None:
        self._landing.close()
        self._producer.close()

    def turn(self) -> None:
        """One round of everything."""
        self._encode_and_pull([picture(next(_numbers), side) for side in SIDES])
        self._encode_and_pull(self._known)
        self._encode([b"no picture", picture(next(_numbers))])
        self._share()
        self._stream()
        self._film()
        self._hurry()
        self._leave()

    def _encode(self, files: list[bytes]) -> list[pb.Ticket]:
        found = self._producer.encode([*map(image, files)], CALL_S)
        return [one for one in found if isinstance(one, pb.Ticket)]

    def _encode_and_pull(self, files: list[bytes]) -> None:
        pulls = [self._pull(ticket) for ticket in self._encode(files)]
        assert wait_for(lambda: all(pull.is_over for pull in pulls), CALL_S), "a pull hangs"
        for pull in pulls:
            assert pull.failure is None, pull.failure
            self._landing.store.free(pull.block)

    def _pull(self, ticket: pb.Ticket) -> Pull:
        wanted = PullTicket.from_message(ticket, self._address)
        block = self._landing.store.reserve(f"{next(_numbers):064x}", wanted.shape.block_bytes)
        pull = Pull(wanted, block, time.monotonic() + CALL_S)
        self._landing.start(pull)
        return pull

    def _share(self) -> None:
        """The same new picture twice at once."""
        request = pb.EncodeRequest(items=[image(picture(next(_numbers), SIDES[-1]))])
        calls = [self._producer.stub.Encode.future(request, timeout=CALL_S) for _ in range(2)]
        for call in calls:
            call.result()

    def _stream(self) -> None:
        """Several by EncodeStream, fetched over gRPC; what finds the pool full of leases is not sent again."""
        items = [image(picture(next(_numbers), side)) for side in SIDES[:3]]
        for _, found in self._producer.encode_stream(items, CALL_S):
            if isinstance(found, pb.Ticket):
                self._producer.fetch(found, CALL_S)
            else:
                assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED, found

    def _film(self) -> None:
        """A video, new by a box behind it that players skip."""
        data = videos()["rocket-zoom.mp4"].data + struct.pack(">I4sQ", 16, b"free", next(_numbers))
        self._producer.encode([pb.MediaItem(modality=pb.MODALITY_VIDEO, data=data)], CALL_S)

    def _hurry(self) -> None:
        """A deadline that is too near, and a call that means nothing."""
        request = pb.EncodeRequest(items=[image(picture(next(_numbers), SIDES[-1]))])
        for call, timeout_s in ((request, SHORT_S), (pb.EncodeRequest(), CALL_S)):
            try:
                self._producer.stub.Encode(call, timeout=timeout_s)
            except grpc.RpcError:
                continue

    def _leave(self) -> None:
        """A pull that never ends: its lease expires."""
        for ticket in self._encode(self._known[:1]):
            self._producer.acquire(
                key=ticket.key, epoch=ticket.epoch, lease_id=ticket.lease_id, transport="grpc", timeout_s=CALL_S
            )


class Chat:
    """One client of a vLLM."""

    def __init__(self, url: str) -> None:
        self._url = url

    def close(self) -> None:
        return

    def turn(self) -> None:
        """A request with a new picture and one that was sent before."""
        new = Photo(name="new.png", mime="image/png", data=picture(next(_numbers), SIDES[2]))
        ask(self._url, chat_request([new, photos()["coffee.jpg"], "What are they?"], max_tokens=NUM_TOKENS))


@contextmanager
def load(*clients: Callable[[], Client | Chat]) -> Iterator[None]:
    """Inside it, the clients, each on a thread of its own that makes it, ask and ask.

    A busy machine loses some (leases are short): a turn may fail. Raises `AssertionError` where all of a client's do.
    """
    over = threading.Event()
    troubles: dict[Callable[[], Client | Chat], Exception | None] = {}

    def run(make: Callable[[], Client | Chat]) -> None:
        with closing(make()) as client:
            while not over.wait(PAUSE_S):
                try:
                    client.turn()
                    troubles[make] = None
                except FAILURES as error:
                    troubles.setdefault(make, error)

    threads = [threading.Thread(target=run, args=[client]) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for client in clients:
        error = troubles.get(client, AssertionError("it could not be made"))
        assert error is None, f"nothing that {client} asked was answered: {error!r}"
