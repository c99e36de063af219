"""A conversation for vLLM's offline `LLM`: its media encoded, its arguments left alone."""

import asyncio
import base64
import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from PIL import Image
from vllm import SamplingParams

from consumer_shim.offline import encode_chat
from consumer_shim.rewrite import RequestError
from consumer_shim.tickets import from_params
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheServicer, add_EncoderCacheServicer_to_server
from tests.kit.ports import free_port

BOUND_S = 20.0


class Encoder(EncoderCacheServicer):
    """Gives ticket 0 to the first item of a call, and so on; none to a file named `bad`. It encodes nothing."""

    def __init__(self) -> None:
        self.items: list[pb.MediaItem] = []

    def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        if any(item.data == b"bad" for item in request.items):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no image")
        self.items += request.items
        tickets = [ticket(number, item) for number, item in enumerate(request.items)]
        return pb.EncodeResponse(outcomes=[pb.ItemOutcome(ticket=one) for one in tickets])


def ticket(number: int, item: pb.MediaItem) -> pb.Ticket:
    fields: dict[str, Any] = {"num_rows": 4, "width": 8, "dtype": "float32", "epoch": "0" * 16}
    fields |= {"key": f"{number:064x}", "lease_id": f"{number:032x}", "modality": item.modality}
    return pb.Ticket(**fields, content_part=json.dumps(stand_in(number)))


def stand_in(number: int) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 10]}, "uuid": f"{number:064x}"}


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
def address(encoder: Encoder) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    add_EncoderCacheServicer_to_server(encoder, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait(BOUND_S)


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def conversation(*parts: Any) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "You are kind."},
        {"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]},
    ]


def test_media_become_tickets(encoder: Encoder, address: str) -> None:
    picture = Image.new("RGB", (3, 2), "red")
    messages, params = encode_chat(
        conversation(image(b"one"), {"type": "image_pil", "image_pil": picture}),
        SamplingParams(max_tokens=5),
        address,
        timeout_s=BOUND_S,
    )
    assert encoder.items == [
        pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"one"),
        pb.MediaItem(modality=pb.MODALITY_IMAGE, decoded=pb.DecodedMedia(shape=[2, 3, 3], data=b"\xff\0\0" * 6)),
    ]
    assert messages == conversation(stand_in(0), stand_in(1))
    pulls = from_params(params.extra_args["ec_transfer_params"])
    assert [pull.lease_id for pull in pulls] == [f"{0:032x}", f"{1:032x}"]
    assert {pull.address for pull in pulls} == {address}
    assert params.max_tokens == 5


def test_its_arguments_stay_as_they_are(address: str) -> None:
    messages = conversation(image(b"one"))
    params = SamplingParams(max_tokens=5, extra_args={"mine": [1]})
    before = copy.deepcopy(messages), copy.deepcopy(params)
    for _ in range(2):
        found = encode_chat(messages, params, address, timeout_s=BOUND_S)
        assert found[0] == conversation(stand_in(0))
        assert (messages, params.extra_args) == (before[0], {"mine": [1]})
        assert repr(params) == repr(before[1])
        assert found[1] is not params


def test_tickets_go_beside_other_arguments(address: str) -> None:
    params = SamplingParams(extra_args={"mine": 1, "kv_transfer_params": {"a": 1}})
    _, found = encode_chat(conversation(image(b"one")), params, address, timeout_s=BOUND_S)
    assert found.extra_args.keys() == {"mine", "kv_transfer_params", "ec_transfer_params"}
    assert (found.extra_args["mine"], found.extra_args["kv_transfer_params"]) == (1, {"a": 1})


@pytest.mark.parametrize("parts", [[], [image(b"one")]])
def test_other_transfer_params_are_kept(address: str, parts: list[dict[str, Any]]) -> None:
    params = SamplingParams(extra_args={"ec_transfer_params": {"mine": 1}})
    _, found = encode_chat(conversation(*parts), params, address, timeout_s=BOUND_S)
    assert found.extra_args["ec_transfer_params"]["mine"] == 1
    assert len(from_params(found.extra_args["ec_transfer_params"])) == len(parts)
    assert params.extra_args == {"ec_transfer_params": {"mine": 1}}


def test_a_conversation_without_media(encoder: Encoder, address: str) -> None:
    messages = [*conversation(), {"role": "assistant", "content": None}]
    found, params = encode_chat(messages, SamplingParams(), address, timeout_s=BOUND_S)
    assert found == messages
    assert from_params(params.extra_args["ec_transfer_params"]) == []
    assert encoder.items == []


async def test_within_a_running_event_loop(address: str) -> None:
    """As in a notebook; the loop stands still meanwhile and goes on afterwards."""
    messages, _ = encode_chat(conversation(image(b"one")), SamplingParams(), address, timeout_s=BOUND_S)
    assert messages == conversation(stand_in(0))
    assert await asyncio.to_thread(lambda: 5) == 5


async def test_from_several_threads_at_once(address: str) -> None:
    def encode() -> object:
        return encode_chat(conversation(image(b"one")), SamplingParams(), address, timeout_s=BOUND_S)[0]

    assert await asyncio.gather(*(asyncio.to_thread(encode) for _ in range(4))) == [conversation(stand_in(0))] * 4


@pytest.mark.parametrize(
    ("part", "status", "sentence"),
    [
        (image(b"bad"), 400, "no image"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}, 400, "nothing is fetched here"),
        ({"type": "image_pil", "image_pil": Image.new("RGBA", (2, 2))}, 400, "mode RGB"),
    ],
)
def test_what_cannot_be_served(address: str, part: dict[str, Any], status: int, sentence: str) -> None:
    messages = conversation(part)
    with pytest.raises(RequestError, match=sentence) as refused:
        encode_chat(messages, SamplingParams(), address, timeout_s=BOUND_S)
    assert refused.value.status == status
    assert messages == conversation(part)


def test_a_producer_that_is_down() -> None:
    with pytest.raises(RequestError, match="failed") as refused:
        encode_chat(conversation(image(b"one")), SamplingParams(), f"127.0.0.1:{free_port()}", timeout_s=BOUND_S)
    assert refused.value.status == 503
