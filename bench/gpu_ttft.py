"""The part `ttft`: time to the first token, LLM-only vLLM behind the shim beside a vLLM that does all by itself."""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.client import HTTPConnection
from urllib.parse import urlsplit

from bench import ours, peer
from bench.gpu_record import Record
from bench.gpu_servers import Place, start_all
from bench.gpu_service import pictures_of
from bench.gpu_targets import OURS, PEER
from bench.load import closed
from tests.kit.servers import ProducerServer, VllmServer
from tests.kit.stack import Stack

SIDES, REHEARSED = (448, 1036), (112, 224)
NUMBER, WARM = 20, 3
CALL_S, IN_FLIGHT = 60.0, 4
FIRST = 50
"""Of loads of pictures that none of the other parts has."""


def measure_first_tokens(record: Record, place: Place, sides: Sequence[int], number: int = NUMBER) -> None:
    """The median over `number` requests, one at a time, in turn at either; every picture is new to both.

    Raises:
        ValueError: a server was not ready, or a request failed.
    """
    loads = [(side, number, WARM, 1) for side in sides]
    pictures = dict(zip(sides, pictures_of(loads, FIRST), strict=True))
    with Stack() as stack:
        producer = place.ours()
        shim = place.answering("llm-only", producer.address)
        alone = place.answering("monolithic")
        servers = {OURS: producer, "llm-only": shim, "monolithic": alone}
        for name, ready in start_all(stack, place, servers).items():
            if isinstance(ready, str):
                raise ValueError(f"ttft {name}: {ready}")
        for side, images in pictures.items():
            _measure_side(record, side, images, producer, shim, alone)
        _check_pulls(record, producer, sum(map(len, pictures.values())))


def _measure_side(
    record: Record, side: int, images: Sequence[bytes], producer: ProducerServer, shim: VllmServer, alone: VllmServer
) -> None:
    asyncio.run(_encode(producer.address, images))
    times: dict[str, list[float]] = {OURS: [], PEER: []}
    for index, image in enumerate(images):
        turns = [(OURS, shim), (PEER, alone)]
        for name, server in turns if index % 2 else reversed(turns):
            took_s = first_token_s(server.url, peer.request(image))
            if index >= WARM:
                times[name].append(took_s * 1000)
    for name, found in times.items():
        figures = {"median_ms": statistics.median(found), "least_ms": min(found), "most_ms": max(found)}
        record.put(f"ttft/{name}/{side}", figures | {"requests": len(found)})


async def _encode(address: str, images: Sequence[bytes]) -> None:
    """Has all of them encoded, so that the producer has their embeddings from then on."""
    async with ours.client(address) as send:
        await closed(send, [ours.request(image) for image in images], IN_FLIGHT)


def first_token_s(url: str, body: bytes) -> float:
    """From the request until the event that brings the first token.

    Raises:
        ValueError: there is none.
    """
    message = json.dumps({**json.loads(body), "stream": True, "return_token_ids": True, "ignore_eos": True})
    connection = HTTPConnection(urlsplit(url).netloc, timeout=CALL_S)
    try:
        connection.connect()
        since_s = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", message, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise ValueError(f"vLLM answers {response.status}: {response.read(500)!r}")
        for line in response:
            if _has_token(line):
                took_s = time.perf_counter() - since_s
                response.read()
                return took_s
    finally:
        connection.close()
    raise ValueError("the answer had no token")


def _has_token(line: bytes) -> bool:
    """Whether a line of the stream is an event with a token; the first event has the role only.

    Raises:
        ValueError: it says that the request failed.
    """
    data = line.strip().removeprefix(b"data: ")
    if not data.startswith(b"{"):
        return False
    event = json.loads(data)
    if "error" in event:
        raise ValueError(f"vLLM answers: {str(event['error'])[:500]}")
    return any(choice.get("token_ids") for choice in event["choices"])


def _check_pulls(record: Record, producer: ProducerServer, number: int) -> None:
    """Each picture must have come from the pool, and its embedding have been pulled."""
    pulls = int(producer.metric_reaching(number, "ec_producer_pulls_total"))
    cached = int(producer.metric("ec_producer_items_shared_total", source="pool"))
    record.put("ttft/check", {"requests": number, "pulls": pulls, "found_in_pool": cached})
    if pulls < number or cached < number:
        record.add("failures", f"ttft: of {number} pictures {cached} were in the pool and {pulls} were pulled")
