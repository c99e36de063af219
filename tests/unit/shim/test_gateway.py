"""A chat request's way to the producer and back, with a producer that answers as a test says."""

import asyncio
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

from consumer_shim import gateway
from consumer_shim.client import ProducerError
from consumer_shim.gateway import encode_request
from consumer_shim.rewrite import RequestError
from consumer_shim.tickets import from_params
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.unit.conftest import Clock
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
        self.calls: list[tuple[list[pb.MediaItem], float, Any]] = []
        self.released: list[str] = []

    async def encode(
        self, items: Sequence[pb.MediaItem], timeout_s: float, *, settings: Mapping[str, Any] | None = None
    ) -> list[pb.Ticket | ProducerError]:
        self.calls.append((list(items), timeout_s, settings))
        self.meanwhile()
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
    """The gateway's time."""
    clock = Clock()
    monkeypatch.setattr(gateway, "time", SimpleNamespace(monotonic=clock))
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
    producer.outcomes = ProducerError(code, "", "why")
    refused = await refusal(chat([image(b"one")]), producer)
    assert (refused.status, str(refused)) == (status, f"encoding at {ADDRESS} failed: why")


@pytest.mark.parametrize("tickets", [[], [ticket(0)], [ticket(0), ticket(1), ticket(2)]])
async def test_another_number_of_tickets(tickets: list[pb.Ticket]) -> None:
    producer = FakeProducer(*tickets)
    assert (await refusal(chat([image(b"one"), image(b"two")]), producer)).status == 502
    assert producer.released == [one.lease_id for one in tickets]


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


def several(*outcomes: pb.Ticket | ProducerError | None) -> list[FakeProducer]:
    """Producers of one item, each with its outcome of a call; None for one that nobody reaches."""
    producers = [FakeProducer(address=f"producer:{number}") for number in range(len(outcomes))]
    for producer, outcome in zip(producers, outcomes, strict=True):
        down = ProducerError(grpc.StatusCode.UNAVAILABLE, "", "nobody there")
        producer.outcomes = down if outcome is None else [outcome]
    return producers


def full() -> ProducerError:
    return ProducerError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "no room")


async def test_the_first_that_takes_them_has_them() -> None:
    producers = several(None, full(), ticket(0), ticket(0))
    body = chat([image(b"one")])
    assert await encode(body, producers) == [ticket(0)]
    assert [len(one.calls) for one in producers] == [1, 1, 1, 0]
    assert [pull.address for pull in from_params(body["ec_transfer_params"])] == ["producer:2"]


async def test_a_sequence_stays_as_it_is() -> None:
    producers = several(None, ticket(0))
    before = list(producers)
    await encode(chat([image(b"one")]), producers)
    assert producers == before


async def test_where_none_takes_them_the_last_one_speaks() -> None:
    refused = await refusal(chat([image(b"one")]), several(None, full()))
    assert (refused.status, str(refused)) == (429, "image 1 of 1: no room")
    refused = await refusal(chat([image(b"one")]), several(full(), None))
    assert (refused.status, str(refused)) == (503, "encoding at producer:1 failed: nobody there")


async def test_what_would_fail_elsewhere_too_is_not_tried_there() -> None:
    bad = ProducerError(grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_UNREADABLE", "no image")
    producers = several(full(), bad, ticket(0))
    assert (await refusal(chat([image(b"one")]), producers)).status == 400
    assert [len(one.calls) for one in producers] == [1, 1, 0]


async def test_an_answer_without_sense_is_not_asked_for_elsewhere() -> None:
    producers = several(ticket(0, content_part=""), ticket(0))
    refused = await refusal(chat([image(b"one")]), producers)
    assert refused.status == 502
    assert "producer:0" in str(refused)
    assert [one.released for one in producers] == [[ticket(0).lease_id], []]
    assert producers[1].calls == []


async def test_tickets_are_released_where_they_were_given() -> None:
    first, second = several(ticket(0), ticket(0))
    first.outcomes = [ticket(0), full()]
    second.outcomes = [ticket(2), ticket(3)]
    assert await encode(chat([image(b"one"), image(b"two")]), [first, second]) == [ticket(2), ticket(3)]
    assert (first.released, second.released) == ([ticket(0).lease_id], [])


async def test_all_producers_have_one_deadline(clock: Clock) -> None:
    producers = several(full(), None, ticket(0))

    def wait() -> None:
        clock.now_s += 2.0

    for one in producers:
        one.meanwhile = wait
    await encode(chat([image(b"one")]), producers)
    assert [timeout_s for one in producers for _, timeout_s, _ in one.calls] == [7.0, 5.0, 3.0]


async def test_for_several_producers_a_url_is_fetched_once() -> None:
    fetched: list[str] = []

    async def fetch(url: str, modality: str) -> bytes:
        fetched.append(url)
        return b"cat"

    producers = several(full(), None, ticket(0))
    await encode(chat([{"image_url": "http://image"}]), producers, fetch=fetch)
    assert fetched == ["http://image"]
    assert [[item.data for item in one.items] for one in producers] == [[b"cat"]] * 3
