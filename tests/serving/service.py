"""The real `ec-producer serve` of a tiny model, as its clients and its operator see it."""

import functools
import io
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from PIL import Image

from consumer_shim.client import CHANNEL_OPTIONS, Producer, ProducerError, outcomes
from producer.embedding_pool import LEASE_MARGIN_S
from producer.wire.block import BlockError
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheStub
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.servers import ProducerServer
from tests.serving.table import Record

SLACK_S = 5.0
"""What a call may take beyond its deadline, on a machine whose two cores are shared by all processes."""
CALL_S = 60.0
QUEUE_ITEMS = 16
POOL_BYTES = 1 << 20
LEASE_S = 2.0
ITEM_BYTES = 1 << 20
PREPROCESS_BYTES = 5 << 28
"""A picture of 100 megapixels takes 1,040 MiB to decode and preprocess."""
SETTINGS = {
    "max-queue-items": QUEUE_ITEMS,
    "max-items-per-request": QUEUE_ITEMS,
    "max-item-bytes": ITEM_BYTES,
    "max-request-bytes": 2 * ITEM_BYTES,
    "pool-bytes": POOL_BYTES,
    "lease-s": LEASE_S,
    "max-streams": 8,
    "preprocess-workers": 2,
    "preprocess-memory-bytes": PREPROCESS_BYTES,
}
"""Small, so that little load fills them."""
EXPIRY_S = LEASE_S + LEASE_MARGIN_S + SLACK_S
"""By when a lease that nobody releases has ended."""
NUM_CLIENTS = 4
GAUGES = ("queue_items", "queue_bytes", "pool_leases", "pool_pinned_entries")
Outcome = pb.Ticket | ProducerError


@functools.cache
def picture(number: int, side: int = 56) -> bytes:
    """A PNG, of its own for each number."""
    dots = Image.frombytes("RGB", (8, 8), random.Random(number).randbytes(192))
    buffer = io.BytesIO()
    dots.resize((side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def image(data: bytes) -> pb.MediaItem:
    return pb.MediaItem(modality=pb.MODALITY_IMAGE, data=data)


def code_of(outcome: Outcome) -> str:
    return outcome.code.name if isinstance(outcome, ProducerError) else "OK"


class Call:
    """One Encode under way."""

    def __init__(self, stub: Any, pictures: Sequence[bytes], timeout_s: float) -> None:
        self.pictures = pictures
        self.timeout_s = timeout_s
        self.sent_s = time.monotonic()
        self.ended_s = 0.0
        self._ended = threading.Event()
        self.future = stub.Encode.future(pb.EncodeRequest(items=map(image, pictures)), timeout=timeout_s)
        self.future.add_done_callback(self._end)

    def _end(self, future: Any) -> None:
        self.ended_s = time.monotonic()
        self._ended.set()

    @property
    def took_s(self) -> float:
        return self.ended_s - self.sent_s

    def outcomes(self) -> list[Outcome] | None:
        """One an item, when the call ends; None where it does not in time."""
        if not self._ended.wait(max(0.0, self.sent_s + self.timeout_s + SLACK_S - time.monotonic())):
            self.future.cancel()
            return None
        if self.future.cancelled():
            return [ProducerError(grpc.StatusCode.CANCELLED, "", "cancelled by its client") for _ in self.pictures]
        if error := self.future.exception():
            return [ProducerError.from_call(error) for _ in self.pictures]
        return outcomes(self.future.result())


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds of its host."""

    fds: int
    threads: int
    rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return cls(fds, int(status["Threads"]), int(status["VmRSS"].split()[0]) << 10)

    def grown(self, end: "Usage", record: Record, whose: str) -> None:
        """Counts what grew from this, the middle of a loop, to its end; some memory is the allocator's to keep."""
        record.leaks(max(0, end.fds - self.fds - 4), f"{whose} grew from {self.fds} to {end.fds} files")
        record.leaks(max(0, end.threads - self.threads - 4), f"{whose}: {self.threads} threads, then {end.threads}")
        grown = end.rss_bytes - self.rss_bytes
        record.leaks(int(grown > 24 << 20), f"{whose} grew by {grown >> 20} MiB")


class Service:
    """One server, started when it is first used, and what is known of its answers."""

    def __init__(self) -> None:
        model = cached_checkpoint("qwen2_5_vl")
        flags = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
        self.server = ProducerServer(model, transports=("nixl",), extra_args=flags, name="serving")
        self.clients = [Producer(self.server.address) for _ in range(NUM_CLIENTS)]
        self.truth: dict[bytes, bytes] = {}
        """The first embedding of each picture; every later one must equal it."""
        self._numbers = iter(range(1, 1 << 30))

    def start(self) -> None:
        """Starts it unless it runs, and waits until every client is connected."""
        if not self.server.running:
            self.server.stop()
            self.server.start()
            self.server.wait_ready()
            for client in self.clients:
                client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=CALL_S, wait_for_ready=True)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.stop()

    @property
    def pid(self) -> int:
        return self.server.pid

    @property
    def pictures(self) -> list[bytes]:
        """Those of `truth` that are nothing but pictures: a GIF may have been sent as a video."""
        return [one for one in self.truth if not one.startswith(b"GIF8")]

    def new_pictures(self, number: int, side: int = 56) -> list[bytes]:
        """Pictures that were never sent before."""
        return [picture(next(self._numbers), side) for _ in range(number)]

    def send(self, *pictures: bytes, timeout_s: float = CALL_S) -> Call:
        """One Encode, by one of several clients."""
        return Call(random.choice(self.clients).stub, pictures, timeout_s)

    def collect(self, record: Record, calls: Iterable[Call], *allowed: str) -> list[tuple[bytes, pb.Ticket]]:
        """Waits for all and counts each item's outcome, of those that are allowed. The tickets, not fetched yet."""
        tickets = []
        for call in calls:
            record.tried += len(call.pictures)
            found = call.outcomes()
            if found is None:
                record.hangs(f"an Encode had not ended {SLACK_S:.0f} s after its deadline", len(call.pictures))
                continue
            record.expect(len(found) == len(call.pictures), f"{len(call.pictures)} items, {len(found)} outcomes")
            for one, outcome in zip(call.pictures, found, strict=False):
                record.ended(code_of(outcome))
                record.expect(code_of(outcome) in allowed, f"outcome {code_of(outcome)}: {outcome}"[:300])
                if not isinstance(outcome, ProducerError):
                    tickets.append((one, outcome))
        return tickets

    def check(self, record: Record, tickets: Iterable[tuple[bytes, pb.Ticket]]) -> None:
        """Fetches what was promised, releases it, and compares it with what the same picture gave before."""
        for one, ticket in tickets:
            try:
                rows = self.clients[0].fetch(ticket, CALL_S)
            except (ProducerError, BlockError) as error:
                record.expect(False, f"a ticket's embedding cannot be fetched: {error}")
                continue
            same = self.truth.setdefault(one, rows) == rows
            record.expect(same, f"the embedding of key {ticket.key[:16]} differs from an earlier one")

    def check_works(self, record: Record) -> None:
        """A good picture, new and an old one, is encoded again within a bound."""
        pictures = self.new_pictures(1) + list(self.truth)[:1]
        record.tried += len(pictures)
        tickets = wait_for(lambda: self._encode(pictures), CALL_S)
        if not tickets:
            record.hangs("the service does not encode any more", len(pictures))
            return
        record.outcomes["OK"] += len(pictures)
        self.check(record, zip(pictures, tickets, strict=True))

    def _encode(self, pictures: list[bytes]) -> list[pb.Ticket]:
        """Tickets for all, or none."""
        try:
            found = self.clients[0].encode([*map(image, pictures)], timeout_s=SLACK_S)
        except ProducerError:
            return []
        return [one for one in found if not isinstance(one, ProducerError)] if all(map(_is_ok, found)) else []

    def check_settled(self, record: Record, bound_s: float = SLACK_S) -> None:
        """Nothing waits and nothing is held, by then; `EXPIRY_S` where leases were left to end by themselves."""
        held: dict[str, float] = {}

        def settled() -> bool:
            held.update({name: self.server.metric(f"ec_producer_{name}") for name in GAUGES})
            return not any(held.values())

        if not wait_for(settled, bound_s):
            record.leaks(int(max(held.values())), f"held {bound_s:.0f} s after the last call: {held}")

    def counts(self) -> dict[str, int]:
        """Items so far by code, as the service counts them."""
        codes = (code.name for code in grpc.StatusCode)
        return {code: n for code in codes if (n := int(self.server.metric("ec_producer_items_total", code=code)))}

    def raw_stub(self) -> tuple[grpc.Channel, Any]:
        """A channel of its own, for a client that behaves badly; the caller closes it."""
        channel = grpc.insecure_channel(self.server.address, options=CHANNEL_OPTIONS)
        return channel, EncoderCacheStub(channel)


def _is_ok(outcome: Outcome) -> bool:
    return not isinstance(outcome, ProducerError)


def wait_for(condition: Callable[[], Any], bound_s: float, poll_s: float = 0.1) -> Any:
    """What `condition` gives, once it is true, or what it gives in the end."""
    deadline_s = time.monotonic() + bound_s
    while not (value := condition()) and time.monotonic() < deadline_s:
        time.sleep(poll_s)
    return value
