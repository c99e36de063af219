"""Admission: permits, shared encodes and cancellation, on one event loop."""

import asyncio
import math
import re
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from producer.admission import Admission
from producer.core import DecodedForm, Lease, MediaItem, PreparedItem
from producer.embedding_pool import EmbeddingPool
from producer.errors import DeadlineError, InternalError, InvalidItemError, OverloadedError, UnavailableError
from producer.metrics import Metrics
from producer.wire.content_key import content_key
from producer.wire.contract import Reason
from producer.wire.origin import Origin, current, set_current
from tests.kit.steps import on_this_loop
from tests.unit.conftest import INFO, NUM_BLOCKS, prepared, rows_of, sample

FINGERPRINT = "f" * 64
MAX_ITEM_BYTES = 3 << 20
MAX_QUEUE_ITEMS = 2
MAX_QUEUE_BYTES = 4 << 20
WAIT_S = 60.0
"""Longer than anything here takes: reaching it means that it never comes."""


class Stages:
    """Stands in for preprocessing and the step loop. Nothing moves on until a test says so; there are no threads."""

    def __init__(self, pool: EmbeddingPool) -> None:
        self._pool = pool
        self.prepared: list[str] = []
        self.cancelled: list[str] = []
        self.submitted: dict[str, Future[None]] = {}
        self.arrived = asyncio.Event()
        self.ready = asyncio.Event()
        self.ready.set()
        self.error: Exception | None = None

    async def prepare(self, key: str, item: MediaItem) -> PreparedItem:
        self.prepared.append(key)
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        if self.error is not None:
            raise self.error
        return PreparedItem(key=key, modality=item.modality, num_rows=4, content_part={}, inputs=None)

    def submit(self, item: PreparedItem) -> "Future[None]":
        self.submitted[item.key] = Future()
        self.arrived.set()
        return self.submitted[item.key]

    def finish(self, key: str) -> None:
        self._pool.put(key, INFO, rows_of(0))
        self.submitted[key].set_result(None)


@pytest.fixture
def stages(pool: EmbeddingPool) -> Stages:
    return Stages(pool)


@pytest.fixture
def admission(pool: EmbeddingPool, stages: Stages, metrics: Metrics) -> Admission:
    return Admission(
        pool,
        on_this_loop(stages.prepare),
        stages.submit,
        fingerprint=FINGERPRINT,
        modalities=("image", "video"),
        max_queue_items=MAX_QUEUE_ITEMS,
        max_item_bytes=MAX_ITEM_BYTES,
        max_queue_bytes=MAX_QUEUE_BYTES,
        metrics=metrics,
    )


def image(data: bytes = b"photo") -> MediaItem:
    return MediaItem(modality="image", data=data)


def key_of(data: bytes = b"photo") -> str:
    return content_key(FINGERPRINT, "image", data)


async def until(condition: Callable[[], object]) -> None:
    """Lets everything else run until `condition` holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")


async def begin(admission: Admission, stages: Stages, data: bytes = b"photo") -> "asyncio.Task[Lease]":
    """A client whose item has come as far as the device."""
    client = asyncio.create_task(admission.encode(image(data)))
    await until(lambda: key_of(data) in stages.submitted)
    return client


async def join(admission: Admission, data: bytes = b"photo") -> "asyncio.Task[Lease]":
    """A client that waits for an item that another one has begun."""
    client = asyncio.create_task(admission.encode(image(data)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not client.done()
    return client


async def encode(admission: Admission, stages: Stages, data: bytes = b"photo") -> Lease:
    client = await begin(admission, stages, data)
    stages.finish(key_of(data))
    return await client


# What is let in


async def test_an_item_is_encoded_and_leased(admission: Admission, stages: Stages, pool: EmbeddingPool) -> None:
    lease = await encode(admission, stages)
    assert lease.key == key_of()
    assert pool.release(lease.lease_id) is lease


@pytest.mark.parametrize(
    ("item", "reason", "message"),
    [
        (
            MediaItem(modality="audio", data=b"x"),
            Reason.UNSUPPORTED_MODALITY,
            "modality audio is not served; image, video is",
        ),
        (image(b""), Reason.MEDIA_EMPTY, "the item has no data"),
        (image(b"https://example.org/cat.png"), Reason.MEDIA_REFUSED, "media arrive as bytes, nothing is fetched"),
        (image(b"data:image/png;base64,AAAA"), Reason.MEDIA_REFUSED, "media arrive as bytes, nothing is fetched"),
        (image(bytes(MAX_ITEM_BYTES + 1)), Reason.MEDIA_TOO_LARGE, "3145729 bytes; at most 3145728 are allowed"),
    ],
    ids=["modality", "empty", "URL", "data URL", "large"],
)
async def test_a_bad_item_is_refused_before_any_work(
    admission: Admission, stages: Stages, item: MediaItem, reason: Reason, message: str
) -> None:
    with pytest.raises(InvalidItemError, match=message) as caught:
        await asyncio.wait_for(admission.encode(item), WAIT_S)
    assert caught.value.reason is reason
    assert stages.prepared == []


@pytest.mark.parametrize("num_bytes", [1, 1 << 20, (1 << 20) + 1, MAX_ITEM_BYTES])
async def test_the_key_is_the_same_wherever_it_is_computed(
    admission: Admission, stages: Stages, num_bytes: int
) -> None:
    """Large files are hashed off the event loop."""
    data = bytes(num_bytes)
    client = asyncio.create_task(admission.encode(image(data)))
    await asyncio.wait_for(stages.arrived.wait(), WAIT_S)
    stages.finish(key_of(data))
    assert (await client).key == key_of(data)


async def test_a_full_queue_refuses_another_item_but_not_one_of_its_own(admission: Admission, stages: Stages) -> None:
    first, _second = [await begin(admission, stages, data) for data in (b"1", b"2")]
    with pytest.raises(OverloadedError, match="2 items are waiting already") as caught:
        await asyncio.wait_for(admission.encode(image(b"3")), WAIT_S)
    assert caught.value.reason is Reason.QUEUE_FULL
    same = await join(admission, b"1")
    stages.finish(key_of(b"1"))
    assert (await first).key == (await same).key
    await begin(admission, stages, b"3")


async def test_media_that_wait_are_bounded_in_bytes(admission: Admission, stages: Stages, metrics: Metrics) -> None:
    """Whoever waits counts, also for what another has begun; and what was refused or done does not count on."""
    data = b"x" * (MAX_QUEUE_BYTES // 2 - 5000)
    first, second = await begin(admission, stages, data), await join(admission, data)
    with pytest.raises(OverloadedError, match=f"at most {MAX_QUEUE_BYTES} may") as caught:
        await asyncio.wait_for(admission.encode(image(data)), WAIT_S)
    assert caught.value.reason is Reason.QUEUE_FULL
    stages.finish(key_of(data))
    assert (await first).key == (await second).key
    assert sample(metrics, "queue_bytes") == 0
    assert (await admission.encode(image(data))).key == key_of(data)


# Deadlines


async def test_an_item_ends_at_its_deadline(admission: Admission, stages: Stages) -> None:
    stages.ready.clear()
    deadline_s = asyncio.get_running_loop().time() + 0.05
    with pytest.raises(DeadlineError, match="not encoded in time") as caught:
        await asyncio.wait_for(admission.encode(image(), deadline_s), WAIT_S)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    await until(lambda: stages.cancelled == [key_of()])


async def test_an_item_without_a_deadline_ends_too(admission: Admission, stages: Stages) -> None:
    stages.ready.clear()
    admission._item_timeout_s = 0.05
    with pytest.raises(DeadlineError, match="not encoded in time"):
        await asyncio.wait_for(admission.encode(image()), WAIT_S)


async def test_a_deadline_ends_one_clients_wait_and_not_anothers(admission: Admission, stages: Stages) -> None:
    patient = await begin(admission, stages)
    with pytest.raises(DeadlineError):
        await admission.encode(image(), asyncio.get_running_loop().time() + 0.05)
    stages.finish(key_of())
    assert (await patient).key == key_of()


async def test_no_work_is_begun_for_a_deadline_that_has_passed(admission: Admission, stages: Stages) -> None:
    with pytest.raises(DeadlineError, match=r"0\.000 s are left") as caught:
        await admission.encode(image(), asyncio.get_running_loop().time() - 1)
    assert caught.value.reason is Reason.DEADLINE_UNMEETABLE
    assert stages.prepared == []


async def test_no_work_is_begun_for_a_deadline_that_those_before_will_miss(
    admission: Admission, stages: Stages
) -> None:
    await begin(admission, stages, b"before")
    admission._pace.begin(0.0)
    for number in range(1, 11):
        admission._pace.finish(10.0 * number)
    now_s = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineError, match="those before it take about 10"):
        await admission.encode(image(), now_s + 5)
    assert stages.prepared == [key_of(b"before")]
    client = asyncio.create_task(admission.encode(image(), now_s + 1e6))
    await until(lambda: key_of() in stages.submitted)
    stages.finish(key_of())
    assert (await client).key == key_of()


# What a client decoded


@pytest.fixture
def open_admission(pool: EmbeddingPool, stages: Stages, metrics: Metrics) -> Admission:
    """It lets every modality in."""
    return Admission(
        pool,
        on_this_loop(stages.prepare),
        stages.submit,
        fingerprint=FINGERPRINT,
        modalities=("image", "video", "audio"),
        max_queue_items=MAX_QUEUE_ITEMS,
        max_item_bytes=MAX_ITEM_BYTES,
        metrics=metrics,
    )


def decoded(modality: str, data: bytes, shape: tuple[int, ...], rate_hz: float = 1.0) -> MediaItem:
    return MediaItem(modality=modality, data=data, decoded=DecodedForm(shape=shape, rate_hz=rate_hz))


class Untouched(int):
    """A size that nobody may calculate with: the client chose how many there are."""

    def _touch(self, other: Any) -> Any:
        raise AssertionError("calculated with before it was counted")

    __mul__ = __rmul__ = __add__ = __radd__ = _touch  # type: ignore[assignment]


@pytest.mark.parametrize(
    "item",
    [
        decoded("image", b"http:" + bytes(7), (2, 2, 3), 0.0),
        decoded("image", bytes(3), (1, 1, 3), math.nan),  # of no meaning
        decoded("video", b"data:" + bytes(13), (2, 3, 1, 3), 0.04),
        decoded("video", bytes(3), (1, 1, 1, 3), 1000.0),
        decoded("audio", b"file:" + bytes(3), (2,), 16000.0),
        decoded("audio", struct.pack("<f", math.nan), (1,), 384e3),
        decoded("image", bytes(3 << 19), (512, 1024, 3)),  # hashed off the event loop
    ],
    ids=lambda item: f"{item.modality} {item.data[:5]!r}",
)
async def test_what_a_client_decoded_is_let_in(open_admission: Admission, stages: Stages, item: MediaItem) -> None:
    """However it begins: pixels and samples are no URL."""
    client = asyncio.create_task(open_admission.encode(item))
    await asyncio.wait_for(stages.arrived.wait(), WAIT_S)
    form = (item.decoded.shape, item.decoded.rate_hz)
    key = content_key(FINGERPRINT, item.modality, item.data, form)
    stages.finish(key)
    assert (await client).key == key != content_key(FINGERPRINT, item.modality, item.data)


@pytest.mark.parametrize(
    ("item", "reason", "message"),
    [
        (decoded("image", b"", (1, 1, 3)), Reason.MEDIA_EMPTY, "the item has no data"),
        (decoded("image", b"", (0, 0, 3)), Reason.MEDIA_EMPTY, "the item has no data"),
        (
            decoded("image", bytes(MAX_ITEM_BYTES + 3), (1, (1 << 20) + 1, 3)),
            Reason.MEDIA_TOO_LARGE,
            "3145731 bytes; at most 3145728 are allowed",
        ),
        *(
            (
                decoded(modality, bytes(num_bytes), shape),
                Reason.MEDIA_UNREADABLE,
                f"a decoded {modality} of shape {said}",
            )
            for modality, num_bytes, shape, said in [
                ("image", 12, (2, 2, 2), "2x2x2 does not have 12 bytes"),
                ("image", 11, (2, 2, 3), "2x2x3 does not have 11 bytes"),
                ("image", 13, (2, 2, 3), "2x2x3 does not have 13 bytes"),
                ("image", 12, (2, 0, 3), "2x0x3 does not have 12 bytes"),
                ("image", 12, (12,), "12 does not have"),
                ("image", 12, (2, 6), "2x6 does not have"),
                ("image", 12, (1, 2, 2, 3), "1x2x2x3 does not have"),
                ("image", 4, (2, 2, 1), "2x2x1 does not have"),
                ("image", 16, (2, 2, 4), "2x2x4 does not have"),
                ("image", 12, (3, 2, 2), "3x2x2 does not have"),  # channels first
                ("image", 48, (2, 2, 3), "2x2x3 does not have 48 bytes"),  # float32
                ("image", 12, (), " does not have 12 bytes"),
                ("image", 12, (2**32 - 1,) * 3, "4294967295x4294967295x4294967295 does not have 12 bytes"),
                ("image", 12, (2**31, 2**31, 3), "2147483648x2147483648x3 does not have 12 bytes"),
                ("video", 12, (2, 2, 3), "2x2x3 does not have"),
                ("video", 12, (1, 3, 2, 2), "1x3x2x2 does not have"),
                ("video", 12, (2, 2, 2, 3), "2x2x2x3 does not have 12 bytes"),
                ("video", 3, (1, 1, 1, 1, 3), "1x1x1x1x3 does not have"),
                ("audio", 8, (8,), "8 does not have 8 bytes"),  # int8
                ("audio", 4, (2,), "2 does not have 4 bytes"),  # int16
                ("audio", 8, (1, 2), "1x2 does not have"),
                ("audio", 24, (2, 3), "2x3 does not have"),  # channels
                ("audio", 7, (2,), "2 does not have 7 bytes"),
            ]
        ),
    ],
    ids=lambda value: f"{value.modality} {value.decoded.shape}" if isinstance(value, MediaItem) else "",
)
async def test_a_form_that_the_bytes_do_not_have_is_refused_before_any_work(
    open_admission: Admission, stages: Stages, item: MediaItem, reason: Reason, message: str
) -> None:
    with pytest.raises(InvalidItemError, match=message) as caught:
        await asyncio.wait_for(open_admission.encode(item), WAIT_S)
    assert caught.value.reason is reason
    assert stages.prepared == []


@pytest.mark.parametrize("rate_hz", [0.0, -0.0, -1.0, 5e-324, 1e300, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("modality", ["video", "audio"])
async def test_a_rate_that_is_none_is_refused_before_any_work(
    open_admission: Admission, stages: Stages, modality: str, rate_hz: float
) -> None:
    item = decoded(modality, bytes(12), {"video": (2, 2, 1, 3), "audio": (3,)}[modality], rate_hz)
    with pytest.raises(InvalidItemError, match=re.escape(f"of the {modality} is {rate_hz}; allowed are ")) as caught:
        await asyncio.wait_for(open_admission.encode(item), WAIT_S)
    assert caught.value.reason is Reason.MEDIA_UNREADABLE
    assert stages.prepared == []


async def test_a_refused_form_is_said_shortly(open_admission: Admission) -> None:
    """Its sentence travels in a header, and those have a limit."""
    with pytest.raises(InvalidItemError) as caught:
        await open_admission.encode(decoded("image", bytes(3), (2**32 - 1,) * 1000))
    assert len(str(caught.value)) < 300


async def test_a_shape_of_many_sizes_is_not_calculated_with(open_admission: Admission, stages: Stages) -> None:
    with pytest.raises(InvalidItemError):
        await open_admission.encode(decoded("image", bytes(3), (Untouched(2),) * 5))
    assert stages.prepared == []


@pytest.mark.parametrize(
    "item",
    [decoded("video", bytes(3 << 18), (1 << 18, 1, 1, 3), 30.0), decoded("audio", bytes(1 << 20), (1 << 18,), 1.0)],
    ids=["a quarter of a million frames", "three days"],
)
async def test_what_grows_without_bound_is_refused(open_admission: Admission, stages: Stages, item: MediaItem) -> None:
    client = asyncio.create_task(open_admission.encode(item))
    await until(lambda: client.done() or stages.arrived.is_set())
    if not client.done():
        client.cancel()
        pytest.fail("it was let in")
    assert isinstance(client.exception(), InvalidItemError)


# What is shared


async def test_equal_items_asked_for_together_are_encoded_once(
    admission: Admission, stages: Stages, metrics: Metrics
) -> None:
    clients = [await begin(admission, stages), await join(admission), await join(admission)]
    assert sample(metrics, "queue_items") == 1
    stages.finish(key_of())
    leases = await asyncio.gather(*clients)
    assert len({lease.lease_id for lease in leases}) == 3
    assert stages.prepared == [key_of()]
    assert sample(metrics, "items_shared_total", source="in_flight") == 2
    assert sample(metrics, "queue_items") == 0


async def test_what_the_pool_has_is_not_encoded_again(admission: Admission, stages: Stages, metrics: Metrics) -> None:
    first = await encode(admission, stages)
    second = await asyncio.wait_for(admission.encode(image()), WAIT_S)
    assert (second.generation, second.lease_id == first.lease_id) == (first.generation, False)
    assert stages.prepared == [key_of()]
    assert sample(metrics, "items_shared_total", source="pool") == 1


async def test_an_error_is_everybodys_and_the_next_one_tries_anew(admission: Admission, stages: Stages) -> None:
    stages.ready.clear()
    stages.error = InvalidItemError(Reason.MEDIA_UNREADABLE, "not an image")
    clients = [await join(admission), await join(admission)]
    stages.ready.set()
    errors = await asyncio.gather(*clients, return_exceptions=True)
    assert [str(error) for error in errors] == ["not an image"] * 2
    stages.error = None
    assert (await encode(admission, stages)).key == key_of()


async def test_a_failed_step_is_the_clients_error(admission: Admission, stages: Stages, metrics: Metrics) -> None:
    client = await begin(admission, stages)
    stages.submitted[key_of()].set_exception(InternalError(Reason.ENCODE_FAILED, "failed"))
    with pytest.raises(InternalError, match="failed"):
        await client
    assert sample(metrics, "queue_items") == 0


# What is given up


async def test_work_goes_on_while_one_client_waits(admission: Admission, stages: Stages) -> None:
    first, second = await begin(admission, stages), await join(admission)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not stages.submitted[key_of()].cancelled()
    stages.finish(key_of())
    assert (await second).key == key_of()


async def test_work_that_nobody_waits_for_is_dropped(admission: Admission, stages: Stages, metrics: Metrics) -> None:
    clients = [await begin(admission, stages), await join(admission)]
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await until(stages.submitted[key_of()].cancelled)
    assert sample(metrics, "queue_items") == 0


async def test_preprocessing_that_nobody_waits_for_is_dropped(admission: Admission, stages: Stages) -> None:
    stages.ready.clear()
    client = await join(admission)
    client.cancel()
    await until(lambda: stages.cancelled == [key_of()])


async def test_nobody_joins_work_that_is_being_dropped(admission: Admission, stages: Stages) -> None:
    """Its cancellation takes a turn of the loop; who asks in that turn begins anew."""
    stages.ready.clear()
    first = await join(admission)
    first.cancel()
    second = asyncio.create_task(admission.encode(image()))
    await until(lambda: len(stages.prepared) == 2)
    stages.ready.set()
    await until(lambda: key_of() in stages.submitted)
    stages.finish(key_of())
    assert (await second).key == key_of()


async def test_a_permit_comes_back_with_a_cancellation(admission: Admission, stages: Stages) -> None:
    clients = [await begin(admission, stages, data) for data in (b"1", b"2")]
    clients[0].cancel()
    await asyncio.gather(clients[0], return_exceptions=True)
    await begin(admission, stages, b"3")


# Between preprocessing and the device


class Chain:
    """Stages whose futures end on threads of their own, as the real ones' do; a test says when.

    It does not reproduce queues, nor what they do.
    """

    def __init__(self, pool: EmbeddingPool) -> None:
        self._pool = pool
        self.preparing: dict[str, Future[PreparedItem]] = {}
        self.submitted: dict[str, Future[None]] = {}
        self.submitted_on: list[tuple[threading.Thread, str]] = []
        """The threads on which items came to the device, each with the id of the request that it was for."""
        self.error: Exception | None = None

    def prepare(self, key: str, item: MediaItem) -> "Future[PreparedItem]":
        return self.preparing.setdefault(key, Future())

    def submit(self, item: PreparedItem) -> "Future[None]":
        self.submitted_on.append((threading.current_thread(), current().request_id))
        if self.error is not None:
            raise self.error
        return self.submitted.setdefault(item.key, Future())

    def end_preprocessing(self, key: str, error: Exception | None = None) -> None:
        part: dict[str, Any] = {}
        item = PreparedItem(key=key, modality="image", num_rows=4, content_part=part, inputs=None)
        ending = self.preparing[key]
        on_a_thread(lambda: ending.set_exception(error) if error else ending.set_result(item))

    def end_steps(self, *keys: str) -> None:
        def end() -> None:
            for key in keys:
                self._pool.put(key, INFO, rows_of(0))
                self.submitted[key].set_result(None)

        on_a_thread(end)


def on_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.fixture
def chain(pool: EmbeddingPool) -> Chain:
    return Chain(pool)


@pytest.fixture
def chained(pool: EmbeddingPool, chain: Chain, metrics: Metrics) -> Admission:
    return Admission(
        pool,
        chain.prepare,
        chain.submit,
        fingerprint=FINGERPRINT,
        modalities=("image",),
        max_queue_items=NUM_BLOCKS,
        max_item_bytes=MAX_ITEM_BYTES,
        metrics=metrics,
    )


async def ask(admission: Admission, chain: Chain, data: bytes = b"photo") -> "asyncio.Task[Lease]":
    client = asyncio.create_task(admission.encode(image(data)))
    await until(lambda: key_of(data) in chain.preparing)
    return client


async def test_an_item_goes_to_the_device_without_the_event_loop(chained: Admission, chain: Chain) -> None:
    """On the thread that ended its preprocessing, for the same request; the loop has no turn meanwhile."""
    set_current(Origin(request_id="mine"))
    client = await ask(chained, chain)
    set_current(Origin(request_id="another's"))
    chain.end_preprocessing(key_of())
    ((thread, request_id),) = chain.submitted_on
    assert thread is not threading.current_thread()
    assert request_id == "mine"
    chain.end_steps(key_of())
    assert (await asyncio.wait_for(client, WAIT_S)).key == key_of()


async def test_an_encode_takes_no_task_and_a_step_one_wake_up(
    chained: Admission, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [b"%d" % number for number in range(NUM_BLOCKS)]
    clients = [await ask(chained, chain, data) for data in files]
    loop, num_wake_ups = asyncio.get_running_loop(), 0
    wake = loop.call_soon_threadsafe

    def counted(*call: Any, **options: Any) -> asyncio.Handle:
        nonlocal num_wake_ups
        num_wake_ups += 1
        return wake(*call, **options)

    assert len(asyncio.all_tasks()) == len(files) + 1
    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", counted)
        for data in files:
            chain.end_preprocessing(key_of(data))
        chain.end_steps(*map(key_of, files))
        assert [(await asyncio.wait_for(client, WAIT_S)).key for client in clients] == list(map(key_of, files))
    assert num_wake_ups == 1


async def test_an_error_of_preprocessing_is_the_clients(chained: Admission, chain: Chain, metrics: Metrics) -> None:
    client = await ask(chained, chain)
    chain.end_preprocessing(key_of(), InvalidItemError(Reason.MEDIA_UNREADABLE, "not an image"))
    with pytest.raises(InvalidItemError, match="not an image"):
        await asyncio.wait_for(client, WAIT_S)
    assert chain.submitted_on == []
    assert sample(metrics, "queue_items") == 0


async def test_a_device_that_takes_nothing_more_is_the_clients_error(chained: Admission, chain: Chain) -> None:
    client = await ask(chained, chain)
    chain.error = UnavailableError(Reason.SHUTTING_DOWN, "the service is shutting down")
    chain.end_preprocessing(key_of())
    with pytest.raises(UnavailableError, match="shutting down"):
        await asyncio.wait_for(client, WAIT_S)


async def test_what_cannot_begin_is_the_clients_error_and_leaves_nothing(
    chained: Admission, chain: Chain, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(key: str, item: MediaItem) -> "Future[PreparedItem]":
        raise UnavailableError(Reason.WORKER_DIED, "preprocessing is down")

    monkeypatch.setattr(chained, "_prepare", refuse)
    with pytest.raises(UnavailableError, match="preprocessing is down"):
        await chained.encode(image())
    assert sample(metrics, "queue_items") == 0


@pytest.mark.parametrize("stage", ["preparing", "submitted"])
async def test_what_nobody_waits_for_is_cancelled_where_it_is(
    chained: Admission, chain: Chain, metrics: Metrics, stage: str
) -> None:
    client = await ask(chained, chain)
    if stage == "submitted":
        chain.end_preprocessing(key_of())
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    assert getattr(chain, stage)[key_of()].cancelled()
    assert sample(metrics, "queue_items") == 0
    assert len(chain.submitted_on) == (stage == "submitted")


async def test_what_was_given_up_in_a_process_never_reaches_the_device(chained: Admission, chain: Chain) -> None:
    """A process that has begun goes on; what it makes is of no use any more."""
    client = await ask(chained, chain)
    chain.preparing[key_of()].set_running_or_notify_cancel()
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    chain.end_preprocessing(key_of())
    assert chain.submitted_on == []


async def test_what_was_given_up_between_the_stages_is_cancelled(
    chained: Admission, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client leaves while one thread hands it to the device: the stage that is cancelled is over already."""
    client = await ask(chained, chain)
    work = chained._works[key_of()]
    submit = chain.submit

    def leave(item: PreparedItem) -> "Future[None]":
        work.cancel()
        return submit(item)

    monkeypatch.setattr(work, "_submit", leave)
    chain.end_preprocessing(key_of())
    assert chain.submitted[key_of()].cancelled()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(client, WAIT_S)


async def test_a_drain_cut_short_waits_for_no_step(chained: Admission, chain: Chain) -> None:
    """The step in hand cannot be cancelled; who waits for it is told all the same."""
    client = await ask(chained, chain)
    chain.end_preprocessing(key_of())
    chain.submitted[key_of()].set_running_or_notify_cancel()
    draining = asyncio.create_task(chained.drain())
    await asyncio.sleep(0)
    draining.cancel()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(client, WAIT_S)
    chain.end_steps(key_of())
    await asyncio.sleep(0)


# What the pool cannot hold


async def test_an_embedding_evicted_before_its_lease_is_overload(
    admission: Admission, stages: Stages, pool: EmbeddingPool
) -> None:
    client = await begin(admission, stages)
    stages.finish(key_of())
    for number in range(NUM_BLOCKS):  # before the client's turn comes
        pool.put(prepared(number).key, INFO, rows_of(number))
    with pytest.raises(OverloadedError, match="evicted at once") as caught:
        await client
    assert caught.value.reason is Reason.POOL_FULL


async def test_too_many_leases_are_refused_before_any_work(
    admission: Admission, stages: Stages, pool: EmbeddingPool
) -> None:
    pool.put(prepared(0).key, INFO, rows_of(0))
    for _ in range(NUM_BLOCKS + 2):
        pool.grant(prepared(0).key)
    with pytest.raises(OverloadedError) as caught:
        await asyncio.wait_for(admission.encode(image()), WAIT_S)
    assert caught.value.reason is Reason.TOO_MANY_LEASES
    assert stages.prepared == []


# Draining


async def test_draining_waits_for_work_in_hand_and_begins_none(admission: Admission, stages: Stages) -> None:
    client = await begin(admission, stages)
    draining = asyncio.create_task(admission.drain())
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="shutting down") as caught:
        await asyncio.wait_for(admission.encode(image(b"other")), WAIT_S)
    assert caught.value.reason is Reason.SHUTTING_DOWN
    assert not draining.done()
    stages.finish(key_of())
    await draining
    assert (await client).key == key_of()


async def test_draining_survives_an_error_in_hand(admission: Admission, stages: Stages) -> None:
    client = await begin(admission, stages)
    draining = asyncio.create_task(admission.drain())
    await asyncio.sleep(0)
    stages.submitted[key_of()].set_exception(InternalError(Reason.ENCODE_FAILED, "failed"))
    await draining
    with pytest.raises(InternalError, match="failed"):
        await client


async def test_a_drain_cut_short_tells_those_who_wait(admission: Admission, stages: Stages) -> None:
    client = await begin(admission, stages)
    draining = asyncio.create_task(admission.drain())
    await asyncio.sleep(0)
    draining.cancel()
    with pytest.raises(UnavailableError):
        await client
