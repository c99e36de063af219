"""The peer: vLLM's own encoder-only instance, and clients that have pictures encoded by chat requests over HTTP.

It saves each embedding through `ECExampleConnector` as a file, before it answers.
"""

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

import aiohttp

from bench.load import Send
from tests.kit.processes import LOGS_DIR
from tests.kit.servers import SERVED_MODEL, VllmServer

CALL_S = 60.0
ENCODER_ONLY = ("--mm-encoder-only", "--no-enable-prefix-caching")
HEADERS = {"content-type": "application/json"}


def server(
    model: Path,
    saved: Path,
    *,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    logs: Path = LOGS_DIR,
) -> VllmServer:
    """vLLM, not started yet, that saves embeddings in the folder `saved`; the last of equal flags counts."""
    transfer = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_producer",
        "ec_connector_extra_config": {"shared_storage_path": str(saved)},
    }
    flags = [*ENCODER_ONLY, "--ec-transfer-config", json.dumps(transfer), *extra_args]
    return VllmServer(model, extra_args=flags, env=env, name="bench-peer", logs=logs)


def request(image: bytes) -> bytes:
    """The chat request that has `image` encoded, and asks for as little else as there can be."""
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"}]
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": SERVED_MODEL, "max_tokens": 1, "messages": messages}).encode()


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[Send[bytes]]:
    """Sends what `request` makes."""
    target = f"{url}/v1/chat/completions"
    connections = aiohttp.TCPConnector(limit=0)  # of whoever sends, not of this
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    async with aiohttp.ClientSession(connector=connections, timeout=timeout, headers=HEADERS) as session:

        async def send(body: bytes) -> None:
            async with session.post(target, data=body) as response:
                text = await response.text()
                if response.status != HTTPStatus.OK:
                    raise ValueError(f"vLLM answers {response.status}: {text[:500]}")

        yield send
