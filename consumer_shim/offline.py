"""For vLLM's offline `LLM` with the shim's connector: has the media of a conversation encoded elsewhere.

messages, sampling = encode_chat(messages, SamplingParams(max_tokens=64), "encoder:50051", timeout_s=60)
outputs = llm.chat(messages, sampling)
"""

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from consumer_shim.channel import PLAIN, ChannelSecurity
from consumer_shim.client import AsyncProducer
from consumer_shim.gateway import encode_request

_PARAMS = "ec_transfer_params"


def encode_chat(
    messages: list[dict[str, Any]],
    sampling_params: Any,
    producer: str,
    *,
    timeout_s: float,
    security: ChannelSecurity = PLAIN,
) -> tuple[list[dict[str, Any]], Any]:
    """One conversation and its `SamplingParams`, changed so that they carry no media but tickets; copies of both.

    Args:
        messages: as `LLM.chat` takes them, with data URLs, and with `image_pil` for images that were decoded already.
        sampling_params: of this conversation.
        producer: host:port, one that the `LLM` is configured with.
        timeout_s: seconds for encoding.
        security: how the producer is reached; plaintext without a token by default.

    Raises:
        RequestError: the media cannot be served.
    """
    params = copy.copy(sampling_params)
    extra = dict(params.extra_args or {})
    request: dict[str, Any] = {
        "messages": [_copied(message) for message in messages],
        "ec_transfer_params": extra.get(_PARAMS),
    }
    with ThreadPoolExecutor(1) as thread:  # there may be a running event loop in this one, as in a notebook
        thread.submit(asyncio.run, _encode(request, producer, timeout_s, security)).result()
    params.extra_args = {**extra, _PARAMS: request[_PARAMS] or {}}
    return request["messages"], params


async def _encode(request: dict[str, Any], address: str, timeout_s: float, security: ChannelSecurity) -> None:
    producer = AsyncProducer(address, security=security)
    try:
        await encode_request(request, producer, timeout_s)
    finally:
        await producer.close()


def _copied(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose list of content parts is its own."""
    content = message.get("content")
    return {**message, "content": list(content)} if isinstance(content, list) else message
