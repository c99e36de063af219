"""One trace from a chat request to its pull, through real vLLM, and the request's id along the way."""

import io
import secrets
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.e2e.conftest import TRANSPORTS, VLLM_TRACES, Servers
from tests.kit.chat import PATH, TIMEOUT_S, Part, chat_request
from tests.kit.collector import Collector, SpanSeen, named
from tests.kit.photos import Photo

pytestmark = pytest.mark.e2e

PARENT = "b" * 16
HTTP = f"POST {PATH}"
OF_VLLM = "llm_request"


def fresh() -> Photo:
    """A picture that no server has seen: one that it has is not pulled again."""
    file = io.BytesIO()
    Image.frombytes("RGB", (64, 64), secrets.token_bytes(64 * 64 * 3)).save(file, "PNG")
    return Photo(name="fresh.png", mime="image/png", data=file.getvalue())


def post(url: str, parts: Sequence[Part], headers: dict[str, str]) -> httpx.Response:
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=False) as client:  # plain HTTP
        return client.post(PATH, json=chat_request(parts), headers=headers)


def traced(trace_id: str, **more: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{PARENT}-01", **more}


def is_whole(spans: Sequence[SpanSeen], *more: str) -> bool:
    names = [one.name for one in spans]
    return all(name in names for name in (HTTP, "encode", "Encode", "item", "pull", "Acquire", "Release", *more))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_trace_from_http_to_the_pull(servers: Servers, collector: Collector, transport: str) -> None:
    """Where vLLM traces too, its span lies below ours."""
    trace_id = secrets.token_hex(16)
    answer = post(servers.llm_only[transport].url, [fresh(), "What is it?"], traced(trace_id))
    assert answer.status_code == 200, answer.text
    more = [*(["Fetch"] if transport == "grpc" else []), *([OF_VLLM] if transport == VLLM_TRACES else [])]
    spans = collector.trace(trace_id, lambda found: is_whole(found, *more))
    by_id = {one.span_id: one for one in spans}
    parents = {one.name: by_id[one.parent_id].name for one in spans if one.parent_id in by_id}
    expected = {"encode": HTTP, "Encode": "encode", "item": "Encode", "pull": HTTP}
    expected |= {"read": "pull", "Acquire": "pull", "Release": "pull"}
    assert parents.items() >= expected.items()
    assert (OF_VLLM in parents) == (transport == VLLM_TRACES)
    assert parents.get(OF_VLLM, HTTP) == HTTP
    http, pull = named(spans, HTTP), named(spans, "pull")
    assert http.parent_id == PARENT
    assert http.attributes == {"code": 200}
    assert pull.attributes["transport"] == transport
    assert http.start_ns < named(spans, "Encode").end_ns < pull.start_ns < pull.end_ns < http.end_ns
    assert {one.service for one in spans} >= {"ec-producer", "ec-producer-shim"}


def test_requests_without_media_and_those_that_nobody_sampled_leave_nothing(
    servers: Servers, collector: Collector
) -> None:
    url = servers.llm_only["grpc"].url
    text, unsampled, last = (secrets.token_hex(16) for _ in range(3))
    assert post(url, ["Hello."], traced(text)).status_code == 200
    assert post(url, [fresh(), "?"], {"traceparent": f"00-{unsampled}-{PARENT}-00"}).status_code == 200
    assert post(url, [fresh(), "?"], {}).status_code == 200
    assert post(url, [fresh(), "!"], traced(last)).status_code == 200
    collector.trace(last, lambda found: HTTP in [one.name for one in found])
    assert not {text, unsampled} & {one.trace_id for one in collector.spans}


def test_a_refused_request_says_its_id_and_has_failed(servers: Servers, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    bad: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    request = chat_request(["?"])
    request["messages"][0]["content"].append(bad)
    headers = traced(trace_id, **{"X-Request-Id": "mine-1"})
    url = servers.llm_only["grpc"].url + PATH
    answer = httpx.post(url, json=request, headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=False)
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine-1")
    spans = collector.trace(trace_id, lambda found: {HTTP, "item"} <= {one.name for one in found})
    assert named(spans, HTTP).attributes == {"code": 400}
    assert named(spans, "item").attributes["reason"] == "MEDIA_UNREADABLE"
    log = servers.llm_only["grpc"].log.read_text()
    assert f"[request_id=mine-1 trace_id={trace_id}]" in log


def test_vllm_names_a_request_by_the_id_of_the_shim(servers: Servers) -> None:
    answer = post(servers.llm_only["shm"].url, [fresh(), "?"], {"X-Request-Id": "mine-2"})
    assert answer.json()["id"] == "chatcmpl-mine-2"
    answer = post(servers.llm_only["shm"].url, [fresh(), "?"], {})
    assert len(answer.json()["id"]) == len("chatcmpl-") + 32  # made by the shim, as hex digits
