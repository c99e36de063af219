"""Chat bodies: which parts are media, what they become, and everything else unchanged."""

import base64
import copy
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import _parse_chat_message_content_mm_part

from consumer_shim import rewrite
from consumer_shim.rewrite import MediaPart, RequestError, apply_tickets, data_of, find_media, names_media, tickets_in
from consumer_shim.tickets import PullTicket, from_params
from producer.wire.contract import TICKETS_PARAM
from producer.wire.modality import modality_number
from producer.wire.pb import encoder_cache_pb2 as pb


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def video(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


def audio(data: bytes) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": data_url(data, "audio/wav")}}


def input_audio(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    """A request with one message for each content."""
    return {"model": "m", "messages": [{"role": "user", "content": content} for content in contents], **more}


def ticket(number: int, modality: str = "image", **changes: Any) -> pb.Ticket:
    fields = {"key": f"{number:064x}", "modality": modality_number(modality), "num_rows": 4, "width": 8}
    fields |= {"dtype": "float32", "epoch": "0" * 16, "lease_id": f"{number:032x}"}
    return pb.Ticket(**(fields | {"content_part": json.dumps(embeds(number, modality))} | changes))


def embeds(number: int, modality: str = "image") -> dict[str, Any]:
    """What medium `number` becomes."""
    kind = f"{modality}_embeds"
    return {"type": kind, kind: {"image_grid_thw": [1, 8, 10 + number]}, "uuid": f"{number:064x}"}


def pulls(*numbers: int, modality: str = "image") -> list[PullTicket]:
    return [PullTicket.from_message(ticket(number, modality), "producer:1") for number in numbers]


def rewritten(body: dict[str, Any]) -> list[bytes]:
    """The media of `body`, which has a ticket for each of them afterwards."""
    parts = find_media(body)
    tickets = [ticket(number, part.modality) for number, part in enumerate(parts)]
    apply_tickets(body, parts, tickets, ["producer:1"] * len(tickets))
    return [data_of(part.source) for part in parts if isinstance(part.source, str)]


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


@pytest.mark.parametrize(
    ("part", "modality"),
    [(image(b"one"), "image"), (video(b"one"), "video"), (audio(b"one"), "audio"), (input_audio(b"one"), "audio")],
)
@pytest.mark.parametrize("has_type", [True, False])
@pytest.mark.parametrize("more", [{}, {"uuid": "mine"}])
def test_every_type_of_part(part: dict[str, Any], modality: str, has_type: bool, more: dict[str, str]) -> None:
    body = chat([text("a"), (part if has_type else {k: v for k, v in part.items() if k != "type"}) | more])
    (found,) = find_media(body)
    assert (found.modality, found.index) == (modality, 1)
    assert rewritten(body) == [b"one"]
    assert body["messages"][0]["content"] == [text("a"), embeds(0, modality)]
    assert from_params(body["ec_transfer_params"]) == pulls(0, modality=modality)


def test_modalities_keep_the_order_of_the_prompt() -> None:
    body = chat([video(b"one"), image(b"two")], [input_audio(b"three"), text("!"), image(b"four")])
    assert rewritten(body) == [b"one", b"two", b"three", b"four"]
    assert [pull.modality for pull in from_params(body["ec_transfer_params"])] == ["video", "image", "audio", "image"]
    first, second = (message["content"] for message in body["messages"])
    assert first == [embeds(0, "video"), embeds(1)]
    assert second == [embeds(2, "audio"), text("!"), embeds(3)]


def test_a_picture_that_was_decoded_already() -> None:
    """Offline, vLLM takes such parts; the picture's pixels go to the producer as they are."""
    picture = Image.frombytes("RGB", (3, 2), bytes(range(18)))
    body = chat([{"type": "image_pil", "image_pil": picture}, {"image_pil": picture, "uuid": "mine"}])
    expected = pb.DecodedMedia(shape=[2, 3, 3], data=bytes(range(18)))
    assert [(part.modality, part.source) for part in find_media(body)] == [("image", expected)] * 2
    rewritten(body)
    assert body["messages"][0]["content"] == [embeds(0), embeds(1)]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "F", "CMYK"])
def test_a_picture_of_another_mode(mode: str) -> None:
    with pytest.raises(RequestError, match="expected a PIL image of mode RGB") as refused:
        find_media(chat([{"type": "image_pil", "image_pil": Image.new(mode, (3, 2))}]))
    assert refused.value.status == 400


@pytest.mark.parametrize("value", [None, "x" * 1000, 5, {"mode": "RGB"}, []])
def test_a_picture_that_is_none(value: Any) -> None:
    """JSON has no pictures."""
    with pytest.raises(RequestError, match="expected a PIL image") as refused:
        find_media(chat([{"type": "image_pil", "image_pil": value}]))
    assert refused.value.status == 400
    assert len(str(refused.value)) < 200


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


# vLLM looks at more than `type`: each of these it takes for an image, by way of its request's validation, too.
@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"type": None, "image_url": data_url(b"one")}, id="type null"),
        pytest.param({"type": "input_image", "image_url": data_url(b"one"), "detail": "auto"}, id="of Responses"),
        pytest.param(text("a") | {"image_url": data_url(b"one"), "uuid": "mine"}, id="text with uuid"),
        pytest.param({"type": "?", "image_url": {"url": data_url(b"one")}, "uuid": "mine"}, id="unknown with uuid"),
        pytest.param(video(b"two") | {"image_url": data_url(b"one"), "uuid": "mine"}, id="video with uuid"),
        pytest.param({"video_url": data_url(b"two"), "image_url": data_url(b"one")}, id="the first without a type"),
    ],
)
def test_parts_that_vllm_takes_for_images(part: dict[str, Any]) -> None:
    body = chat([part])
    assert [one.modality for one in find_media(body)] == ["image"]
    assert rewritten(body) == [b"one"]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(text("a") | {"image_url": data_url(b"one")}, id="text"),
        pytest.param({"type": "refusal", "refusal": "no", "video_url": data_url(b"one")}, id="refusal"),
        pytest.param(embeds(0) | {"video_url": data_url(b"one")}, id="embedding with uuid"),
        pytest.param({"image_embeds": {}, "audio_url": data_url(b"one")}, id="embedding without a type"),
        pytest.param({"type": "?", "image_url": data_url(b"one")}, id="unknown"),
        pytest.param({"type": 5, "image_url": data_url(b"one")}, id="malformed"),
        pytest.param(text("a") | {"uuid": "mine"}, id="text with uuid"),
    ],
)
def test_parts_that_vllm_takes_for_something_else(part: dict[str, Any]) -> None:
    """Or refuses."""
    assert find_media(chat([part])) == []


def test_of_several_fields_that_of_the_type_counts() -> None:
    body = chat([video(b"one") | {"image_url": data_url(b"two")}])
    assert [one.modality for one in find_media(body)] == ["video"]
    assert rewritten(body) == [b"one"]


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


@pytest.mark.parametrize("url", ["", None, 5, []])
@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
@pytest.mark.parametrize("in_object", [True, False])
def test_parts_without_a_url(url: Any, kind: str, in_object: bool) -> None:
    with pytest.raises(RequestError, match=f"an {kind} part has no url") as refused:
        find_media(chat([image(b"fine"), {"type": kind, kind: {"url": url} if in_object else url}]))
    assert refused.value.status == 400


@pytest.mark.parametrize("value", [None, "", 5, []])
def test_audio_without_an_object(value: Any) -> None:
    with pytest.raises(RequestError, match="an input_audio part has no data") as refused:
        find_media(chat([{"type": "input_audio", "input_audio": value, "uuid": "mine"}]))
    assert refused.value.status == 400


@pytest.mark.parametrize("value", [{}, {"format": "wav"}, *({"data": data, "format": "wav"} for data in (None, "", 5))])
def test_audio_without_data(value: Any) -> None:
    with pytest.raises(RequestError, match="an input_audio part has no data") as refused:
        find_media(chat([{"type": "input_audio", "input_audio": value}]))
    assert refused.value.status == 400


REFUSED = [
    ("https://example.org/cat.png", "not in a data URL, and nothing is fetched here"),
    ("file:///etc/passwd", "not in a data URL"),
    ("DATA:image/png;base64,AAAA", "not in a data URL"),
    ("data:image/png;base64", "not in a base64 data URL"),
    ("data:image/png,AAAA", "not in a base64 data URL"),
    ("data:image/png;base64,AAA", "not valid base64: Incorrect padding"),
    ("data:image/png;base64,A\nAAA", "not valid base64"),
    ("data:image/png;base64,A*AA", "not valid base64"),
    ("data:image/png;base64,ä", "not valid base64"),
    ("data:video/jpeg;base64,AAAA,AAAA", "a video of single frames"),
    ("data:video/jpeg;base64,AAAA", "a video of single frames"),
]


@pytest.mark.parametrize(("url", "sentence"), REFUSED)
def test_urls_that_are_refused(url: str, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as refused:
        data_of(url)
    assert refused.value.status == 400


def test_the_file_in_a_data_url() -> None:
    assert data_of("data:image/png;base64,") == b""
    assert data_of("data:;base64,AAAA") == b"\0\0\0"
    assert data_of("data:video/mp4;codecs=x;base64,AAAA") == b"\0\0\0"


MIXED = [
    ("image", image(b"one"), embeds(0)),
    ("image", {"image_url": data_url(b"one")}, embeds(0)),
    ("video", video(b"one"), embeds(0, "video")),
    ("audio", input_audio(b"one"), embeds(0, "audio")),
    ("audio", audio(b"one"), embeds(0, "audio")),
]


@pytest.mark.parametrize(("modality", "media", "tensor"), MIXED)
def test_media_and_embeddings_of_a_modality_do_not_mix(modality: str, media: Any, tensor: Any) -> None:
    for body in (chat([media, tensor]), chat([tensor], [media])):
        with pytest.raises(RequestError, match=f"{modality} media or {modality}_embeds parts, not both") as refused:
            find_media(body)
        assert refused.value.status == 400


@pytest.mark.parametrize(("modality", "media", "tensor"), MIXED)
def test_those_of_different_modalities_do(modality: str, media: Any, tensor: Any) -> None:
    others = [embeds(0, other) for other in ("image", "video", "audio") if other != modality]
    body = chat([media, *others])
    assert rewritten(body) == [b"one"]
    assert body["messages"][0]["content"][1:] == others


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
    assert [one.lease_id for one in tickets_in(body)] == [f"{0:032x}", f"{1:032x}"]
    assert tickets_in(chat("text")) == []
    assert tickets_in({"ec_transfer_params": "x"}) == []
    with pytest.raises(RequestError, match=TICKETS_PARAM) as refused:
        tickets_in({"ec_transfer_params": {TICKETS_PARAM: "x"}})
    assert refused.value.status == 400


# What brings media elsewhere

IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
WITH_MEDIA = [
    pytest.param({"messages": [{"role": "user", "content": [IMAGE_BLOCK]}]}, id="Anthropic"),
    pytest.param(
        chat([{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE_BLOCK]}]), id="in a tool's result"
    ),
    pytest.param(
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "?"}, INPUT_IMAGE]}]}, id="Responses"
    ),
    pytest.param(
        {"input": [{"type": "function_call_output", "call_id": "1", "output": [INPUT_IMAGE]}]},
        id="in a function's output",
    ),
    *(
        pytest.param(chat([text("?"), part]), id=part["type"])
        for part in (image(b"one"), video(b"one"), audio(b"one"), input_audio(b"one"))
    ),
    *(
        pytest.param(chat([{kind: data_url(b"one")}]), id=f"{kind} without a type")
        for kind in ("image_url", "video_url", "audio_url", "input_audio")
    ),
    pytest.param(chat([text("?") | {"uuid": "mine", "image_url": data_url(b"one")}]), id="text with uuid"),
    pytest.param({"messages": [chat([text("?")])["messages"], chat([image(b"one")])["messages"]]}, id="batch"),
    pytest.param({"query": "?", "documents": ["a", {"content": [image(b"one")]}]}, id="rerank"),
    pytest.param({"query": {"content": [image(b"one")]}, "documents": ["a"]}, id="rerank by an image"),
    pytest.param({"inputs": [{"content": [text("?"), image(b"one")]}]}, id="Cohere embed"),
    pytest.param({"images": [data_url(b"one")]}, id="images of Cohere embed"),
    pytest.param({"instructions": [image(b"one")]}, id="a field of a future API"),
    pytest.param({"input": {"tools": [image(b"one")]}}, id="a field of that name further in"),
]
WITHOUT_MEDIA = [
    "text with an image_url",
    None,
    [1, 2, 3],  # token ids
    ["one", "two"],
    [{"role": "user", "content": "image"}],
    [{"role": "user", "content": [text("image_url"), {"type": "text", "text": "{'type': 'image'}"}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "image", "input": {"a": 1}}]}],
    [{"type": "message", "content": [{"type": "output_text", "text": "image"}]}, {"type": "reasoning"}],
    [{"type": ["image"]}, {"type": {"image": 1}}, {"type": None}, {"type": 5}],
    [{"type": "text", "text": "?", "image_url": data_url(b"one")}],
    [{"type": "image_embeds", "image_embeds": "AAAA", "uuid": "mine"}],
    {"images": [data_url(b"one")]},
]


@pytest.mark.parametrize("body", WITH_MEDIA)
def test_media_are_found_in_bodies_of_every_api(body: dict[str, Any]) -> None:
    assert names_media({"model": "m", **body})


@pytest.mark.parametrize("field", ["messages", "input", "documents", "of_a_future_api"])
@pytest.mark.parametrize("value", WITHOUT_MEDIA)
def test_no_media_are_found_where_there_are_none(value: Any, field: str) -> None:
    assert not names_media({"model": "m", field: value})


@pytest.mark.parametrize("images", [None, [], ""])
def test_no_images(images: Any) -> None:
    assert not names_media({"model": "m", "texts": ["a"], "images": images})


SCHEMA = {"type": "object", "properties": {"image_url": {"type": "string"}, "image": {"type": "image"}}}


@pytest.mark.parametrize("field", rewrite._SCHEMA_FIELDS)
def test_names_in_a_schema_mean_nothing(field: str) -> None:
    for value in (SCHEMA, [SCHEMA], {"format": {"type": "json_schema", "schema": SCHEMA}}):
        assert not names_media({"input": "draw a cat", field: value})
        assert names_media({"input": [INPUT_IMAGE], field: value})


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            chat([{"type": "tool_use", "id": "1", "name": "crop", "input": {"image_url": "http://cat"}}]),
            id="arguments of an Anthropic tool",
        ),
        pytest.param(
            chat(
                [{"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"input_schema": SCHEMA}}}]
            ),
            id="an Anthropic tool that is added later",
        ),
        pytest.param({"input": "text", "metadata": {"image_url": "http://cat"}}, id="metadata of Responses"),
    ],
)
def test_names_in_other_data_mean_nothing(body: dict[str, Any]) -> None:
    assert not names_media(body)


def test_deep_nesting_is_looked_through() -> None:
    assert not names_media({"input": json.loads("[" * 600 + "]" * 600)})
    assert names_media({"input": json.loads('{"a":[' * 300 + json.dumps(INPUT_IMAGE) + "]}" * 300)})


# Whatever the body

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
other_parts = st.one_of(
    json_values,
    st.builds(text, st.text() | st.just(data_url(b"in a text"))),
    st.fixed_dictionaries({"type": st.sampled_from(["text", "refusal", "image_embeds", 5]), "image_url": json_values}),
    st.fixed_dictionaries({"type": st.sampled_from(["text", "?", "image", 5]), "input_audio": json_values}),
)
other_messages = json_values | st.fixed_dictionaries(
    {"role": json_values, "content": json_values | st.text() | st.lists(other_parts, max_size=4)}
)
other_bodies = st.fixed_dictionaries(
    {"messages": json_values | st.lists(other_messages, max_size=4)},
    optional={"model": json_values, "mm_processor_kwargs": json_values, "ec_transfer_params": json_values},
)
media_parts = st.builds(
    lambda kind, source, more: {kind: source} | more,
    st.sampled_from(["image_url", "image_pil", "video_url", "audio_url", "input_audio"]),
    json_values | st.fixed_dictionaries({}, optional={"url": json_values, "data": json_values, "format": json_values}),
    st.fixed_dictionaries({}, optional={"type": st.text(), "uuid": json_values}),
)


@given(other_bodies)
def test_a_body_without_media_stays_as_it_is(body: dict[str, Any]) -> None:
    before = copy.deepcopy(body)
    assert find_media(body) == []
    assert body == before


def found_in(body: dict[str, Any]) -> list[MediaPart] | int:
    """Its media, or the status that it is refused with."""
    try:
        return find_media(body)
    except RequestError as error:
        return error.status


@given(st.lists(media_parts | other_parts, max_size=4))
def test_media_of_any_form_are_taken_or_refused(parts: list[Any]) -> None:
    body = chat(parts)
    before = copy.deepcopy(body)
    found = found_in(body)
    assert found == 400 if isinstance(found, int) else all(isinstance(part.source, str) for part in found)
    assert body == before


MAKERS = {"image": image, "video": video, "audio": input_audio}


a_medium = st.tuples(st.sampled_from(list(MAKERS)), st.binary(min_size=1, max_size=8))


@given(st.lists(st.lists(a_medium | st.text(), max_size=5)))
def test_only_media_parts_change(messages: list[list[tuple[str, bytes] | str]]) -> None:
    """Pairs stand for media, strings for texts; a text may look like anything."""
    body = chat(
        *([text(one) if isinstance(one, str) else MAKERS[one[0]](one[1]) for one in content] for content in messages)
    )
    media = [one for content in messages for one in content if not isinstance(one, str)]
    assert rewritten(body) == [data for _, data in media]
    found = [part for message in body["messages"] for part in message["content"]]
    numbers = iter(range(len(media)))
    expected = [
        text(one) if isinstance(one, str) else embeds(next(numbers), one[0]) for content in messages for one in content
    ]
    assert found == expected
    tickets = [pull for number, (modality, _) in enumerate(media) for pull in pulls(number, modality=modality)]
    assert from_params(body["ec_transfer_params"]) == tickets
    json.dumps(body)


sources = st.sampled_from([data_url(b"one"), {"url": data_url(b"one")}, {"data": "AAAA", "format": "wav"}, None, 5])
types = st.sampled_from([*rewrite._MODALITIES, *rewrite._OTHER_TYPES, "image", "?", "", None, 5])
parts_with_many_fields = st.builds(
    lambda fields, more: fields | more,
    st.dictionaries(st.sampled_from([*rewrite._MODALITIES, *rewrite._OTHER_TYPES]), sources, max_size=3),
    st.fixed_dictionaries({}, optional={"type": types, "uuid": st.sampled_from(["mine", "", 0, None])}),
)


def type_at_vllm(part: dict[str, Any]) -> str | None:
    """What vLLM takes a part for; None where it refuses it."""
    try:
        kind, _ = _parse_chat_message_content_mm_part(copy.deepcopy(part))  # type: ignore[arg-type]
    except (VLLMValidationError, ValueError, AttributeError):
        return None
    return str(kind)


@given(parts_with_many_fields)
def test_a_part_is_what_vllm_takes_it_for(part: dict[str, Any]) -> None:
    """No media pass by that vLLM would load by itself, and nothing else is replaced."""
    kind = type_at_vllm(part)
    found = found_in(chat([part]))
    if kind in rewrite._MODALITIES:
        assert (
            found == 400 if isinstance(found, int) else [one.modality for one in found] == [rewrite._MODALITIES[kind]]
        )
        assert names_media({"input": [part]})
    elif kind is not None:
        assert found == []


@given(st.dictionaries(st.text() | st.sampled_from(["messages", "input", "images", "tools"]), json_values, max_size=3))
@example({"input": {"type": []}})
def test_any_json_may_be_looked_through_for_media(body: dict[str, Any]) -> None:
    assert names_media(body) in (True, False)


@given(st.sampled_from(["image", "input_image", "image_url", "video_url", "audio_url", "input_audio"]), st.data())
def test_media_are_found_wherever_they_stand(kind: str, data: st.DataObject) -> None:
    value: Any = [{"type": kind, **data.draw(st.dictionaries(st.text(min_size=6), json_values, max_size=2))}]
    for key in data.draw(st.lists(st.text() | st.none(), max_size=20)):
        value = [value] if key is None else {key: value}
    field = data.draw(st.text().filter(lambda name: name not in rewrite._SCHEMA_FIELDS))
    assert names_media({"model": "m", "other": [1, {"other": None}], field: [1, value]})
