"""Clients that leave in the middle: a real web server with the middleware, real sockets, and a real producer behind."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import consumer_shim.fetch  # noqa: F401 – here, since it imports vLLM for long, which is no part of any test
from consumer_shim.middleware import EncodeMiddleware
from tests.integration.rig import SETTINGS, WAIT_S, Rig, eventually

PATH = "/v1/chat/completions"


class Web:
    """A server in vLLM's place: it reads requests and answers each with its own body."""

    def __init__(self, address: str) -> None:
        self.outcomes: list[str] = []
        """What became of each request, in the order in which that was known."""
        self.app = Starlette(routes=[Route(PATH, self._answer, methods=["POST"])])
        self.app.add_middleware(EncodeMiddleware)
        transfer = SimpleNamespace(engine_id="web", ec_connector_extra_config={"producers": [address]})
        model = SimpleNamespace(
            allowed_local_media_path="", allowed_media_domains=None, multimodal_config=SimpleNamespace(**SETTINGS)
        )
        self.app.state.vllm_config = SimpleNamespace(ec_transfer_config=transfer, model_config=model)
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Web"]:
        config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        await eventually(lambda: server.started)
        self.port = server.servers[0].sockets[0].getsockname()[1]
        yield self
        server.should_exit = True
        await serving

    async def _answer(self, request: Request) -> JSONResponse:
        try:
            body = await request.json()
        except ClientDisconnect:
            self.outcomes.append("left")
            raise
        self.outcomes.append("read")
        return JSONResponse(body)


@pytest.fixture
async def web(rig: Rig) -> AsyncIterator[Web]:
    async with Web(rig.address).running() as web:
        yield web


def chat(*files: bytes) -> bytes:
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in files]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()


async def begin(web: Web, body: bytes) -> asyncio.StreamWriter:
    """A client that has sent its request."""
    _, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(body)) + body)
    await writer.drain()
    return writer


async def test_who_leaves_frees_the_producer_at_once(rig: Rig, web: Web) -> None:
    """While one of its items is on the device, one in the queue, and one done."""
    await rig.ticket(b"done")
    num_leases = rig.pool.num_leases
    rig.device.gate.clear()
    writer = await begin(web, chat(b"done", b"on the device", b"queued"))
    await eventually(lambda: rig.device.steps[1:] and rig.sample("queue_items") == 2)
    assert rig.pool.num_leases == num_leases + 1
    writer.close()
    await eventually(lambda: web.outcomes == ["left"])
    await eventually(lambda: rig.sample("queue_items") == 0)
    assert rig.pool.num_leases == num_leases
    rig.device.gate.set()
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://127.0.0.1:{web.port}{PATH}", content=chat(b"queued"), timeout=WAIT_S)
    assert answer.status_code == 200
    assert answer.json()["messages"][0]["content"][0]["type"] == "image_embeds"
    assert web.outcomes == ["left", "read"]
    assert rig.pool.num_leases == num_leases + 1


async def test_who_stays_is_served(rig: Rig, web: Web) -> None:
    rig.device.gate.clear()
    async with httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{web.port}{PATH}"
        posts = [
            asyncio.create_task(client.post(url, content=chat(b"%d" % number), timeout=WAIT_S)) for number in (1, 2)
        ]
        await eventually(lambda: rig.sample("queue_items") == 2)
        rig.device.gate.set()
        assert [(await post).status_code for post in posts] == [200, 200]
    assert web.outcomes == ["read", "read"]
