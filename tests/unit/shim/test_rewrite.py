"""Chat bodies: which parts are media, what they become, and everything else unchanged."""

import base64
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer_shim.rewrite import RequestError, apply_tickets, find_media, leases_in
from consumer_shim.tickets import PullTicket, from_params
from producer.wire.contract import TICKETS_PARAM
from producer.wire.pb import encoder_cache_pb2 as pb


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    """A request with one message for each content."""
    return {"model": "m", "messages": [{"role": "user", "content": content} for content in contents], **more}


def ticket(number: int) -> pb.Ticket:
    message = pb.Ticket(key=f"{number:064x}", modality=pb.MODALITY_IMAGE, num_rows=4, width=8, dtype="float32")
    message.epoch, message.lease_id = "0" * 16, f"{number:032x}"
    message.metadata["image_grid_thw"].CopyFrom(pb.NumberArray(shape=[3], ints=[1, 8, 10 + number]))
    return message


def rewritten(body: dict[str, Any]) -> list[bytes]:
    """The media of `body`, which has a ticket for each of them afterwards."""
    parts = find_media(body)
    apply_tickets(body, parts, [ticket(number) for number, _ in enumerate(parts)], "producer:1")
    return [part.data for part in parts]


def embeds(number: int) -> dict[str, Any]:
    """What image `number` becomes."""
    grid = {"image_grid_thw": [1, 8, 10 + number]}
    return {"type": "image_embeds", "image_embeds": grid, "uuid": f"{number:064x}"}


def pulls(*numbers: int) -> list[PullTicket]:
    return [PullTicket.from_message(ticket(number), "producer:1") for number in numbers]


def test_each_part_is_replaced_where_it_stands() -> None:
    body = chat(
        "look at these",
        [text("first"), image(b"one"), text("and"), image(b"two", detail="low"), text("!")],
        [image(b"three")],
    )
    assert rewritten(body) == [b"one", b"two", b"three"]
    assert (
        body["messages"]
        == chat(
            "look at these",
            [text("first"), embeds(0), text("and"), embeds(1), text("!")],
            [embeds(2)],
        )["messages"]
    )
    assert from_params(body["ec_transfer_params"]) == pulls(0, 1, 2)


def test_the_item_for_the_producer() -> None:
    (part,) = find_media(chat([image(b"one")]))
    assert part.item == pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"one")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": data_url(b"one")},
        {"image_url": {"url": data_url(b"one")}},
        {"image_url": data_url(b"one")},
        {"type": "image_url", "image_url": {"url": data_url(b"one", kind="image/jpeg;charset=x")}, "uuid": "mine"},
    ],
)
def test_every_form_that_vllm_takes(part: dict[str, Any]) -> None:
    body = chat([part])
    assert rewritten(body) == [b"one"]
    assert body["messages"][0]["content"] == [embeds(0)]


def test_scalars_and_floats_of_metadata() -> None:
    message = ticket(0)
    message.metadata["seconds"].CopyFrom(pb.NumberArray(floats=[0.5]))
    message.metadata["times"].CopyFrom(pb.NumberArray(shape=[2], floats=[0.5, 1.0]))
    message.metadata["count"].CopyFrom(pb.NumberArray(ints=[3]))
    body = chat([image(b"one")])
    apply_tickets(body, find_media(body), [message], "producer:1")
    found = body["messages"][0]["content"][0]["image_embeds"]
    assert found == {"image_grid_thw": [1, 8, 10], "seconds": 0.5, "times": [0.5, 1.0], "count": 3}


def test_other_transfer_params_are_kept() -> None:
    body = chat([image(b"one")], ec_transfer_params={"mine": 1, TICKETS_PARAM: ["forged"]})
    rewritten(body)
    assert body["ec_transfer_params"]["mine"] == 1
    assert from_params(body["ec_transfer_params"]) == pulls(0)


def test_null_transfer_params() -> None:
    body = chat([image(b"one")], ec_transfer_params=None, mm_processor_kwargs=None)
    rewritten(body)
    assert from_params(body["ec_transfer_params"]) == pulls(0)


@pytest.mark.parametrize("params", ["x", [1], 5])
def test_transfer_params_that_are_no_object(params: Any) -> None:
    with pytest.raises(RequestError, match="ec_transfer_params"):
        rewritten(chat([image(b"one")], ec_transfer_params=params))


REFUSED = [
    ("https://example.org/cat.png", "not a data URL; .* fetches nothing"),
    ("file:///etc/passwd", "not a data URL"),
    ("DATA:image/png;base64,AAAA", "not a data URL"),
    ("data:image/png;base64", "not a base64 data URL"),
    ("data:image/png,AAAA", "not a base64 data URL"),
    ("data:image/png;base64,AAA", "not valid base64: Incorrect padding"),
    ("data:image/png;base64,A\nAAA", "not valid base64"),
    ("data:image/png;base64,A*AA", "not valid base64"),
    ("data:image/png;base64,ä", "not valid base64"),
    ("", "has no url"),
    (None, "has no url"),
    (5, "has no url"),
    ([], "has no url"),
]


@pytest.mark.parametrize(("url", "sentence"), REFUSED)
@pytest.mark.parametrize("in_object", [True, False])
def test_urls_that_are_refused(url: Any, sentence: str, in_object: bool) -> None:
    with pytest.raises(RequestError, match=sentence) as refused:
        find_media(chat([image(b"fine"), {"type": "image_url", "image_url": {"url": url} if in_object else url}]))
    assert refused.value.status == 400


@pytest.mark.parametrize("body", [chat([image(b"one"), embeds(0)]), chat([embeds(0)], [image(b"one")])])
def test_images_and_embeddings_do_not_mix(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="image_url or image_embeds parts, not both") as refused:
        find_media(body)
    assert refused.value.status == 400


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
def test_settings_that_the_producer_has(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} cannot be set by a request") as refused:
        find_media(chat([image(b"one")], **{name: {"do_resize": False}}))
    assert refused.value.status == 400
    assert find_media(chat([text("no media")], **{name: {"do_resize": False}})) == []
    assert len(find_media(chat([image(b"one")], **{name: {}}))) == 1


def test_leases_of_tickets_that_a_client_brings() -> None:
    body = chat([image(b"one"), image(b"two")])
    rewritten(body)
    assert leases_in(body) == [f"{0:032x}", f"{1:032x}"]
    assert leases_in(chat("text")) == []
    assert leases_in({"ec_transfer_params": "x"}) == []
    with pytest.raises(RequestError, match=TICKETS_PARAM) as refused:
        leases_in({"ec_transfer_params": {TICKETS_PARAM: "x"}})
    assert refused.value.status == 400


# Whatever the body

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
other_parts = st.one_of(
    json_values,
    st.builds(text, st.text() | st.just(data_url(b"in a text"))),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "video_url", "input_audio", 5, None]), "image_url": json_values}
    ),
)
other_messages = json_values | st.fixed_dictionaries(
    {"role": json_values, "content": json_values | st.text() | st.lists(other_parts, max_size=4)}
)
other_bodies = st.fixed_dictionaries(
    {"messages": json_values | st.lists(other_messages, max_size=4)},
    optional={"model": json_values, "mm_processor_kwargs": json_values, "ec_transfer_params": json_values},
)


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and "image_url" in part and part.get("type", "image_url") == "image_url"


def has_media(body: dict[str, Any]) -> bool:
    messages = body["messages"] if isinstance(body["messages"], list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return any(is_image(part) for content in contents if isinstance(content, list) for part in content)


@given(other_bodies.filter(lambda body: not has_media(body)))
def test_a_body_without_media_stays_as_it_is(body: dict[str, Any]) -> None:
    before = copy.deepcopy(body)
    assert find_media(body) == []
    assert body == before


@given(st.lists(st.lists(st.binary(max_size=8) | st.text(), max_size=5), max_size=4))
def test_only_media_parts_change(messages: list[list[bytes | str]]) -> None:
    """Bytes stand for images, strings for texts; a text may look like anything."""
    body = chat(*([image(one) if isinstance(one, bytes) else text(one) for one in content] for content in messages))
    files = [one for content in messages for one in content if isinstance(one, bytes)]
    before = copy.deepcopy(body)
    assert rewritten(body) == files
    found = [part for message in body["messages"] for part in message["content"]]
    numbers = iter(range(len(files)))
    original = [part for message in before["messages"] for part in message["content"]]
    assert found == [embeds(next(numbers)) if is_image(part) else part for part in original]
    assert from_params(body["ec_transfer_params"]) == pulls(*range(len(files)))
    json.dumps(body)
