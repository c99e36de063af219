"""A chat request's way to the producer and back, with a producer that answers as a test says."""

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from consumer_shim.client import ProducerError
from consumer_shim.gateway import encode_request
from consumer_shim.rewrite import RequestError
from consumer_shim.tickets import from_params
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.unit.shim.test_rewrite import audio, chat, embeds, image, input_audio, json_values, text, ticket, video

TIMEOUT_S = 7.0
ADDRESS = "producer:1"
KEY = f"{0:064x}"


class FakeProducer:
    """Stands for AsyncProducer. It sends nothing, tries nothing twice, and gives whatever outcomes it was told."""

    address = ADDRESS

    def __init__(self, *outcomes: pb.Ticket | ProducerError) -> None:
        self.outcomes: list[pb.Ticket | ProducerError] | ProducerError = list(outcomes)
        self.calls: list[tuple[list[pb.MediaItem], float, Any]] = []
        self.released: list[str] = []

    async def encode(
        self, items: Sequence[pb.MediaItem], timeout_s: float, *, settings: Mapping[str, Any] | None = None
    ) -> list[pb.Ticket | ProducerError]:
        self.calls.append((list(items), timeout_s, settings))
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


async def encode(body: dict[str, Any], producer: FakeProducer, **options: Any) -> list[pb.Ticket]:
    return await encode_request(body, producer, TIMEOUT_S, **options)  # type: ignore[arg-type]


async def refusal(body: dict[str, Any], producer: FakeProducer, **options: Any) -> RequestError:
    """The error, after which the request is as it was."""
    before = copy.deepcopy(body)
    with pytest.raises(RequestError) as refused:
        await encode(body, producer, **options)
    assert body == before
    return refused.value


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


REPLACES_AS_IT_COUNTS = pytest.mark.xfail(
    reason="apply_tickets replaces parts until it finds that there are too few or too many tickets"
)


@pytest.mark.parametrize(
    "tickets",
    [
        [],
        pytest.param([ticket(0)], marks=REPLACES_AS_IT_COUNTS),
        pytest.param([ticket(0), ticket(1), ticket(2)], marks=REPLACES_AS_IT_COUNTS),
    ],
)
async def test_another_number_of_tickets(tickets: list[pb.Ticket]) -> None:
    assert (await refusal(chat([image(b"one"), image(b"two")]), FakeProducer(*tickets))).status == 502


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
]


@pytest.mark.parametrize("content_part", HOSTILE)
async def test_what_a_ticket_may_not_put_into_a_request(content_part: str) -> None:
    producer = FakeProducer(ticket(1), ticket(0, content_part=content_part))
    refused = await refusal(chat([image(b"one"), text("a"), image(b"two")]), producer)
    assert refused.status == 502
    assert str(refused).startswith(f"the answer of producer {ADDRESS} makes no sense: ")
    assert len(str(refused)) < 300


@pytest.mark.xfail(reason="_stand_in's _url raises a RequestError(400) of its own, as if the client were at fault")
@pytest.mark.parametrize("source", [{}, "", {"url": ""}, {"url": 5}, None, []])
async def test_an_image_of_a_ticket_without_a_url(source: Any) -> None:
    part = {"type": "image_url", "image_url": source, "uuid": KEY}
    refused = await refusal(chat([image(b"one")]), FakeProducer(ticket(0, content_part=json.dumps(part))))
    assert refused.status == 502


@pytest.mark.xfail(reason="_stand_in looks at `type`; vLLM, since there is a uuid, at image_url first, and fetches it")
async def test_an_embedding_of_a_ticket_with_a_url_beside_it() -> None:
    part = embeds(0) | {"image_url": {"url": "http://evil/"}}
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
