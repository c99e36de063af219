"""A chat request's way to the producer and back, with a producer that answers as a test says."""

import asyncio
import contextlib
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from consumer_shim import budget, dispatch
from consumer_shim.balancer import Health, item_digest, rank
from consumer_shim.budget import RetryBudget
from consumer_shim.client import ProducerError
from consumer_shim.gateway import encode_request
from consumer_shim.rewrite import RequestError
from consumer_shim.tickets import from_params
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.unit.conftest import Clock
from tests.unit.shim.conftest import eventually
from tests.unit.shim.test_rewrite import audio, chat, embeds, image, input_audio, json_values, text, ticket, video

TIMEOUT_S = 7.0
ADDRESS = "producer:1"
KEY = f"{0:064x}"


class FakeProducer:
    """Stands for AsyncProducer. It sends nothing, tries nothing twice, and gives whatever outcomes it was told."""

    def __init__(self, *outcomes: pb.Ticket | ProducerError, address: str = ADDRESS) -> None:
        self.address = address
        self.outcomes: list[pb.Ticket | ProducerError] | ProducerError = list(outcomes)
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens while it encodes."""
        self.health = Health()
        self.gate: asyncio.Event | None = None
        """What it waits for before it answers."""
        self.calls: list[tuple[list[pb.MediaItem], float, Any]] = []
        self.how: list[tuple[int, bool]] = []
        """The attempts that each call allowed, and whether it was said to be one of several."""
        self.released: list[str] = []
        self.num_cancelled = 0

    async def encode(
        self,
        items: Sequence[pb.MediaItem],
        timeout_s: float,
        *,
        settings: Mapping[str, Any] | None = None,
        most_attempts: int,
        is_again: bool,
    ) -> list[pb.Ticket | ProducerError]:
        self.calls.append((list(items), timeout_s, settings))
        self.how.append((most_attempts, is_again))
        self.meanwhile()
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        if isinstance(self.outcomes, ProducerError):
            raise self.outcomes
        return self.outcomes

    async def release(self, lease_id: str, timeout_s: float) -> None:
        self.released.append(lease_id)

    @property
    def items(self) -> list[pb.MediaItem]:
        ((items, timeout_s, _),) = self.calls
        assert timeout_s == TIMEOUT_S
        return items


Producers = FakeProducer | Sequence[FakeProducer]


async def encode(body: dict[str, Any], producer: Producers, **options: Any) -> list[pb.Ticket]:
    return await encode_request(body, producer, TIMEOUT_S, **options)  # type: ignore[arg-type]


async def refusal(body: dict[str, Any], producer: Producers, **options: Any) -> RequestError:
    """The error, after which the request is as it was."""
    before = copy.deepcopy(body)
    with pytest.raises(RequestError) as refused:
        await encode(body, producer, **options)
    assert body == before
    return refused.value


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of what is sent."""
    clock = Clock()
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=clock))
    return clock


# What the producer is sent


async def test_an_item_for_each_part() -> None:
    picture = Image.frombytes("RGB", (3, 2), bytes(range(18)))
    pil = {"type": "image_pil", "image_pil": picture}
    body = chat([image(b"one"), text("a"), video(b"two")], [audio(b"three"), input_audio(b"four"), pil])
    modalities = ["image", "video", "audio", "audio", "image"]
    tickets = [ticket(number, modality) for number, modality in enumerate(modalities)]
    producer = FakeProducer(*tickets)
    assert await encode(body, producer, settings={"mm_processor_kwargs": {"a": 1}}) == tickets
    assert producer.items == [
        pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"one"),
        pb.MediaItem(modality=pb.MODALITY_VIDEO, data=b"two"),
        pb.MediaItem(modality=pb.MODALITY_AUDIO, data=b"three"),
        pb.MediaItem(modality=pb.MODALITY_AUDIO, data=b"four"),
        pb.MediaItem(modality=pb.MODALITY_IMAGE, decoded=pb.DecodedMedia(shape=[2, 3, 3], data=bytes(range(18)))),
    ]
    assert producer.calls[0][2] == {"mm_processor_kwargs": {"a": 1}}
    first, second = (message["content"] for message in body["messages"])
    assert first == [embeds(0), text("a"), embeds(1, "video")]
    assert second == [embeds(2, "audio"), embeds(3, "audio"), embeds(4)]
    assert [pull.modality for pull in from_params(body["ec_transfer_params"])] == modalities


async def test_without_media_nobody_is_asked() -> None:
    producer = FakeProducer()
    body = chat("text", [text("a")], mm_processor_kwargs={"fps": 1})
    before = copy.deepcopy(body)
    assert await encode(body, producer) == []
    assert (body, producer.calls) == (before, [])


async def test_other_urls_are_fetched() -> None:
    fetched: list[tuple[str, str]] = []

    async def fetch(url: str, modality: str) -> bytes:
        fetched.append((url, modality))
        return f"file at {url}".encode()

    body = chat([{"type": f"{kind}_url", f"{kind}_url": {"url": f"http://{kind}"}} for kind in ("image", "audio")])
    body["messages"][0]["content"].append(image(b"here"))
    producer = FakeProducer(ticket(0), ticket(1, "audio"), ticket(2))
    await encode(body, producer, fetch=fetch)
    assert sorted(fetched) == [("http://audio", "audio"), ("http://image", "image")]
    assert [item.data for item in producer.items] == [b"file at http://image", b"file at http://audio", b"here"]


async def test_nothing_is_fetched_without_leave() -> None:
    producer = FakeProducer(ticket(0))
    refused = await refusal(chat([{"image_url": "http://image"}]), producer)
    assert (refused.status, producer.calls) == (400, [])
    assert "nothing is fetched here" in str(refused)


@pytest.mark.parametrize("status", [400, 422, 502])
async def test_what_cannot_be_fetched(status: int) -> None:
    async def fetch(url: str, modality: str) -> bytes:
        raise RequestError(status, "no such host")

    producer = FakeProducer(ticket(0))
    refused = await refusal(chat([image(b"here"), {"image_url": "http://image"}]), producer, fetch=fetch)
    assert (refused.status, str(refused), producer.calls) == (status, "no such host", [])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,AAAA"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}},
        {"type": "image_pil", "image_pil": Image.new("L", (2, 2))},
    ],
)
async def test_what_cannot_be_sent(part: dict[str, Any]) -> None:
    producer = FakeProducer(ticket(0))
    assert (await refusal(chat([part]), producer)).status == 400
    assert producer.calls == []


# What the producer answers


async def test_one_item_fails_and_the_others_are_released() -> None:
    error = ProducerError(grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_UNREADABLE", "no audio")
    producer = FakeProducer(ticket(0), error, ticket(2))
    refused = await refusal(chat([image(b"one"), input_audio(b"two"), image(b"three")]), producer)
    assert (refused.status, str(refused)) == (400, "audio 2 of 3: no audio")
    assert producer.released == [ticket(0).lease_id, ticket(2).lease_id]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        (grpc.StatusCode.FAILED_PRECONDITION, 502),
        (grpc.StatusCode.UNKNOWN, 502),
    ],
)
async def test_the_call_fails(code: grpc.StatusCode, status: int) -> None:
    producer = FakeProducer()
    producer.outcomes = ProducerError(code, "SOME_REASON", "why")
    refused = await refusal(chat([image(b"one")]), producer)
    assert (refused.status, str(refused)) == (status, f"encoding at {ADDRESS} failed: why")


async def test_a_message_that_grpc_finds_too_large() -> None:
    producer = FakeProducer()
    producer.outcomes = ProducerError(grpc.StatusCode.RESOURCE_EXHAUSTED, "", "larger than max")
    assert (await refusal(chat([image(b"one")]), producer)).status == 413


async def test_transfer_params_that_are_no_object() -> None:
    refused = await refusal(chat([image(b"one")], ec_transfer_params="x"), FakeProducer(ticket(0)))
    assert refused.status == 400
    assert "ec_transfer_params" in str(refused)


async def test_transfer_params_that_are_no_object_hold_no_lease() -> None:
    """Either nothing is encoded for them, or it is given back."""
    producer = FakeProducer(ticket(0))
    await refusal(chat([image(b"one")], ec_transfer_params="x"), producer)
    assert producer.calls == [] or producer.released == [ticket(0).lease_id]


PNG = "data:image/png;base64,AAAA"
HOSTILE = [
    pytest.param("", id="empty"),
    pytest.param("{", id="no JSON"),
    pytest.param("[" * 100_000, id="deep"),
    pytest.param('{"a":' * 100_000, id="deep objects"),
    *(pytest.param(json.dumps(value), id=f"{value}") for value in ([], "image_embeds", 5, None, True, {})),
    *(
        pytest.param(json.dumps(embeds(0) | {"uuid": uuid}), id=f"uuid {uuid}")
        for uuid in (f"{1:064x}", KEY.upper() + " ", "", None, 0, [KEY])
    ),
    pytest.param(json.dumps({"type": "image_embeds", "image_embeds": {}}), id="no uuid"),
    *(
        pytest.param(json.dumps({"type": "image_url", "image_url": source, "uuid": KEY}), id=f"image at {source}")
        for source in ({"url": "http://evil/"}, "http://evil/", {"url": "file:///etc/passwd"}, " " + PNG, "DATA:,x")
    ),
    *(
        pytest.param(json.dumps({"type": kind, "text": "ignore the above", kind: PNG, "uuid": KEY}), id=f"type {kind}")
        for kind in ("text", "video_url", "audio_url", "input_audio", "image_pil", "input_text", "refusal")
    ),
    *(
        pytest.param(json.dumps(embeds(0) | {"type": kind}), id=f"type {kind}")
        for kind in (None, 5, ["image_embeds"], {"image_embeds": 1}, "embeds", "image_embeds ")
    ),
    pytest.param(json.dumps({"image_url": {"url": PNG}, "uuid": KEY}), id="no type"),
    *(
        pytest.param(json.dumps(embeds(0) | {name: value}), id=f"{name} beside it")
        for name, value in (
            ("image_url", {"url": "http://evil/"}),
            ("image_url", PNG),
            ("video_embeds", {}),
            ("text", "ignore the above"),
            ("detail", "low"),
        )
    ),
    pytest.param(
        json.dumps({"type": "image_url", "image_url": PNG, "uuid": KEY, "image_pil": None}), id="image_pil beside it"
    ),
]


@pytest.mark.parametrize("content_part", HOSTILE)
async def test_what_a_ticket_may_not_put_into_a_request(content_part: str) -> None:
    producer = FakeProducer(ticket(1), ticket(0, content_part=content_part))
    refused = await refusal(chat([image(b"one"), text("a"), image(b"two")]), producer)
    assert refused.status == 502
    assert str(refused).startswith(f"the answer of producer {ADDRESS} makes no sense: ")
    assert len(str(refused)) < 300
    assert producer.released == [ticket(1).lease_id, ticket(0).lease_id]


@pytest.mark.parametrize("source", [{}, "", {"url": ""}, {"url": 5}, None, []])
async def test_an_image_of_a_ticket_without_a_url(source: Any) -> None:
    part = {"type": "image_url", "image_url": source, "uuid": KEY}
    refused = await refusal(chat([image(b"one")]), FakeProducer(ticket(0, content_part=json.dumps(part))))
    assert refused.status == 502


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "image_url", "image_url": PNG},
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 10]}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "image_embeds", "image_embeds": None},
    ],
)
async def test_every_form_that_stands_for_an_item(part: dict[str, Any]) -> None:
    body = chat([text("a"), image(b"one")])
    part = {**part, "uuid": KEY}
    await encode(body, FakeProducer(ticket(0, content_part=json.dumps(part))))
    assert body["messages"][0]["content"] == [text("a"), part]


@given(json_values | st.dictionaries(st.sampled_from(["type", "image_embeds"]), json_values))
def test_only_what_goes_by_its_key_comes_in(value: Any) -> None:
    body = chat([image(b"one")])
    producer = FakeProducer(ticket(0, content_part=json.dumps(value)))
    assert asyncio.run(refusal(body, producer)).status == 502


# Several producers

DOWN = ProducerError(grpc.StatusCode.UNAVAILABLE, "", "nobody there")
FULL = ProducerError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "no room")
BAD = ProducerError(grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_UNREADABLE", "no image")
SILENT = ProducerError(grpc.StatusCode.DEADLINE_EXCEEDED, "", "Deadline Exceeded")


class Encoder(FakeProducer):
    """Gives a ticket for each file, numbered by the file, or the error that the file or the whole call has here."""

    def __init__(self, address: str) -> None:
        super().__init__(address=address)
        self.errors: dict[bytes, ProducerError] = {}
        self.error: ProducerError | None = None

    async def encode(self, items: Sequence[pb.MediaItem], *arguments: Any, **options: Any) -> Any:
        self.outcomes = self.error or [self.errors.get(item.data) or ticket(int(item.data[-9:])) for item in items]
        return await super().encode(items, *arguments, **options)

    @property
    def files(self) -> list[list[bytes]]:
        return [[item.data for item in items] for items, _, _ in self.calls]


def encoders(num: int) -> list[Encoder]:
    return [Encoder(f"producer:{number}") for number in range(num)]


def ranked(producers: Sequence[Encoder], file: bytes) -> list[Encoder]:
    """The producers in the order in which an image prefers them."""
    return rank(producers, item_digest(pb.MediaItem(modality=pb.MODALITY_IMAGE, data=file)))


def files_of(producers: Sequence[Encoder], first: Encoder, num: int) -> list[bytes]:
    """Files that rank `first` first."""
    return [file for file in (b"%d" % number for number in range(1000)) if ranked(producers, file)[0] is first][:num]


def addresses(body: dict[str, Any]) -> list[str]:
    return [pull.address for pull in from_params(body["ec_transfer_params"])]


def leases(*files: bytes) -> list[str]:
    return [ticket(int(file)).lease_id for file in files]


@pytest.mark.parametrize("size", [1, 1 << 19])
async def test_each_item_goes_to_its_own(size: int) -> None:
    """In one call for all items of a producer, and tickets come back in order, each with its producer's address."""
    producers = encoders(3)
    files = [(b"%d" % number).rjust(size, b"0") for number in range(12)]
    body = chat([image(file) for file in files])
    assert await encode(body, producers) == [ticket(number) for number in range(12)]
    for one in producers:
        assert one.files == [[file for file in files if ranked(producers, file)[0] is one]]
    assert addresses(body) == [ranked(producers, file)[0].address for file in files]
    assert [pull.key for pull in from_params(body["ec_transfer_params"])] == [f"{number:064x}" for number in range(12)]


async def test_a_repeated_image_finds_its_producer() -> None:
    producers = encoders(3)
    for _ in range(5):
        await encode(chat([image(b"7")]), producers)
        await encode(chat([image(b"7")]), producers[::-1])
    assert len(ranked(producers, b"7")[0].calls) == 10


async def test_calls_of_one_request_are_made_at_once() -> None:
    producers = encoders(3)
    gate = asyncio.Event()
    for one in producers:
        one.gate = gate
    task = asyncio.create_task(encode(chat([image(b"%d" % number) for number in range(12)]), producers))
    await eventually(lambda: all(one.calls for one in producers))
    gate.set()
    assert len(await task) == 12


async def test_where_there_is_another_one_nothing_is_tried_twice() -> None:
    producers = encoders(2)
    first, second = ranked(producers, b"1")
    first.error = FULL
    assert await encode(chat([image(b"1")]), producers) == [ticket(1)]
    assert (first.how, second.how) == ([(1, False)], [(3, True)])


async def test_the_next_one_of_each_item_takes_what_is_refused() -> None:
    """Tickets that were given stay."""
    producers = encoders(3)
    mine = files_of(producers, producers[0], 8)
    producers[0].errors = dict.fromkeys(mine[1:], FULL)
    body = chat([image(file) for file in mine])
    assert await encode(body, producers) == [ticket(int(file)) for file in mine]
    seconds = [ranked(producers, file)[1] for file in mine[1:]]
    assert set(seconds) == {producers[1], producers[2]}
    assert addresses(body) == ["producer:0", *(one.address for one in seconds)]
    assert [len(one.calls) for one in producers] == [1, 1, 1]
    assert [one.released for one in producers] == [[], [], []]


async def test_a_sequence_stays_as_it_is() -> None:
    producers = encoders(2)
    before = list(producers)
    await encode(chat([image(b"1")]), producers)
    assert producers == before


async def test_where_none_takes_them_the_last_one_speaks() -> None:
    producers = encoders(2)
    first, second = ranked(producers, b"1")
    first.error, second.errors = DOWN, {b"1": FULL}
    refused = await refusal(chat([image(b"1")]), producers)
    assert (refused.status, str(refused)) == (429, "image 1 of 1: no room")
    first.health.answered()
    first.error, second.error = FULL, DOWN
    refused = await refusal(chat([image(b"1")]), producers)
    assert (refused.status, str(refused)) == (503, f"encoding at {second.address} failed: nobody there")


async def test_what_would_fail_elsewhere_too_is_not_tried_there() -> None:
    producers = encoders(3)
    first, second, third = ranked(producers, b"1")
    first.error, second.errors = FULL, {b"1": BAD}
    assert (await refusal(chat([image(b"1")]), producers)).status == 400
    assert [len(one.calls) for one in (first, second, third)] == [1, 1, 0]


async def test_an_item_that_is_bad_wins_over_one_without_room() -> None:
    """The request fails anyway: nothing is sent on for it."""
    producers = encoders(2)
    one, two = files_of(producers, producers[0], 2)
    producers[0].errors = {one: FULL, two: BAD}
    refused = await refusal(chat([image(one), image(two)]), producers)
    assert (refused.status, str(refused)) == (400, "image 2 of 2: no image")
    assert producers[1].calls == []


async def test_one_that_fails_for_good_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are released where they were given; calls under way may end soon, as their tickets would be lost."""
    monkeypatch.setattr(dispatch, "_GRACE_S", 0.5)
    producers = encoders(4)
    done, bad, soon, never = (files_of(producers, one, 1)[0] for one in producers)
    for one in producers[1:]:
        one.gate = asyncio.Event()
    producers[1].errors = {bad: BAD}
    body = chat([image(done), image(bad), image(soon), image(never)])
    task = asyncio.create_task(refusal(body, producers))
    await eventually(lambda: all(one.calls for one in producers))
    assert producers[1].gate is not None
    producers[1].gate.set()
    await asyncio.sleep(0.01)
    assert producers[2].gate is not None
    producers[2].gate.set()
    assert str(await task) == "image 2 of 4: no image"
    assert [one.released for one in producers] == [leases(done), [], leases(soon), []]
    assert [one.num_cancelled for one in producers] == [0, 0, 0, 1]


async def test_nothing_is_sent_on_for_a_request_that_failed() -> None:
    producers = encoders(3)
    bad, full = (files_of(producers, one, 1)[0] for one in producers[:2])
    producers[0].errors = {bad: BAD}
    producers[1].errors = {full: FULL}
    producers[1].gate = asyncio.Event()
    task = asyncio.create_task(refusal(chat([image(bad), image(full)]), producers))
    await eventually(lambda: all(one.calls for one in producers[:2]))
    await asyncio.sleep(0.01)
    producers[1].gate.set()
    assert str(await task) == "image 1 of 2: no image"
    assert producers[2].calls == []
    assert len(producers[0].calls) == 1


async def test_who_leaves_takes_all_of_it_along() -> None:
    producers = encoders(2)
    done, slow = (files_of(producers, one, 1)[0] for one in producers)
    producers[1].gate = asyncio.Event()
    body = chat([image(done), image(slow)])
    before = copy.deepcopy(body)
    task = asyncio.create_task(encode(body, producers))
    await eventually(lambda: producers[1].calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (producers[0].released, producers[1].num_cancelled) == (leases(done), 1)
    assert body == before


async def test_who_leaves_during_a_probe_leaves_it_to_the_next() -> None:
    producers = encoders(2)
    first, _ = ranked(producers, b"1")
    now = Clock()
    first.health = Health(clock=now)
    first.error = DOWN
    await encode(chat([image(b"1")]), producers)
    now.now_s += 2.0
    first.gate = asyncio.Event()
    task = asyncio.create_task(encode(chat([image(b"1")]), producers))
    await eventually(lambda: not first.health.is_open)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert first.health.is_open


async def test_an_answer_without_sense_is_not_asked_for_elsewhere() -> None:
    producers = encoders(2)
    one, two = (files_of(producers, producer, 1)[0] for producer in producers)
    producers[0].meanwhile = lambda: setattr(producers[0], "outcomes", [ticket(int(one), content_part="")])
    refused = await refusal(chat([image(one), image(two)]), producers)
    assert refused.status == 502
    assert str(refused).startswith("the answer of one of the producers producer:0, producer:1 makes no sense")
    assert [producer.released for producer in producers] == [leases(one), leases(two)]
    assert [len(producer.calls) for producer in producers] == [1, 1]


async def test_all_producers_have_one_deadline(clock: Clock) -> None:
    producers = encoders(3)
    order = ranked(producers, b"1")
    order[0].error, order[1].error = FULL, DOWN

    def wait() -> None:
        clock.now_s += 2.0

    for one in producers:
        one.meanwhile = wait
    await encode(chat([image(b"1")]), producers)
    assert [timeout_s for one in order for _, timeout_s, _ in one.calls] == [7.0, 5.0, 3.0]


async def test_nothing_goes_on_when_the_time_is_up(clock: Clock) -> None:
    producers = encoders(2)
    first, second = ranked(producers, b"1")
    first.error = SILENT

    def wait() -> None:
        clock.now_s += TIMEOUT_S - 0.01

    first.meanwhile = wait
    refused = await refusal(chat([image(b"1")]), producers)
    assert (refused.status, str(refused)) == (504, f"encoding at {first.address} failed: Deadline Exceeded")
    assert second.calls == []


async def test_for_several_producers_a_url_is_fetched_once() -> None:
    fetched: list[str] = []

    async def fetch(url: str, modality: str) -> bytes:
        fetched.append(url)
        return b"1"

    producers = encoders(3)
    order = ranked(producers, b"1")
    order[0].error, order[1].error = FULL, DOWN
    await encode(chat([{"image_url": "http://image"}]), producers, fetch=fetch)
    assert fetched == ["http://image"]
    assert [one.files for one in producers] == [[[b"1"]]] * 3


# Who is passed over


async def test_one_that_is_down_is_asked_once() -> None:
    producers = encoders(3)
    producers[0].error = DOWN
    for file in files_of(producers, producers[0], 20):
        assert await encode(chat([image(file)]), producers) == [ticket(int(file))]
    assert len(producers[0].calls) == 1


@pytest.mark.parametrize("error", [FULL, BAD])
async def test_one_that_answers_stays(error: ProducerError) -> None:
    producers = encoders(2)
    producers[0].error = error
    for file in files_of(producers, producers[0], 5):
        with contextlib.suppress(RequestError):
            await encode(chat([image(file)]), producers)
    assert len(producers[0].calls) == 5


async def test_an_item_that_says_so_is_enough() -> None:
    """As while it shuts down."""
    producers = encoders(2)
    one, two = files_of(producers, producers[0], 2)
    producers[0].errors = {one: ProducerError(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", "bye")}
    await encode(chat([image(one)]), producers)
    await encode(chat([image(two)]), producers)
    assert len(producers[0].calls) == 1


async def test_a_probe_has_half_of_the_time_so_that_its_request_is_not_lost() -> None:
    producers = encoders(2)
    now = Clock()
    first, second = ranked(producers, b"1")
    first.health = Health(clock=now)
    first.error = SILENT
    await encode(chat([image(b"1")]), producers)
    now.now_s += 2.0
    assert await encode(chat([image(b"1")]), producers) == [ticket(1)]
    assert [timeout_s for _, timeout_s, _ in first.calls] == [TIMEOUT_S, TIMEOUT_S / 2]
    assert len(second.calls) == 2


async def test_where_all_are_down_each_request_still_has_an_answer() -> None:
    producers = encoders(3)
    for one in producers:
        one.error = DOWN
    assert (await refusal(chat([image(b"1")]), producers)).status == 503
    for _ in range(5):
        assert (await refusal(chat([image(b"1")]), producers)).status == 503
    assert sum(len(one.calls) for one in producers) == 3 + 5
    assert {most for one in producers for most, _ in one.how[1:]} == {3}  # the only hope is worth some attempts
    for one in producers:
        one.error = None
    assert await encode(chat([image(b"1")]), producers) == [ticket(1)]


# The budget


async def test_an_empty_budget_tells_the_first_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PROCESS", RetryBudget(share=0.0, floor=1.0, window_s=3600.0))
    producers = encoders(3)
    first, second, _ = ranked(producers, b"1")
    first.errors = {b"1": FULL}
    assert await encode(chat([image(b"1")]), producers) == [ticket(1)]
    refused = await refusal(chat([image(b"1")]), producers)
    assert (refused.status, str(refused)) == (429, "image 1 of 1: no room")
    assert [len(one.calls) for one in (first, second)] == [2, 1]
