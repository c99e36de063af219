"""All that a real service says at its most talkative, in JSON: each line parses, none has what must not be in one."""

import base64
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image, PngImagePlugin

from consumer_shim.channel import ChannelSecurity
from consumer_shim.client import Producer, ProducerError
from producer.wire.origin import Origin, work_for
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheStub
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.collector import Collector, SpanSeen, named
from tests.kit.servers import ProducerServer

TIMEOUT_S = 60.0
TOKEN = "TOKENxSECRETxMARK"
WRONG_TOKEN = "WRONGxTOKENxMARK"
MARK = b"MEDIAxSECRETxMARK"
TRACE_ID = "c" * 32
ORIGIN = Origin("id-of-mine", f"00-{TRACE_ID}-{'b' * 16}-01")
FORGED = 'x\n{"time": "now", "level": "critical", "logger": "forged", "message": "forged"}'


@dataclass(frozen=True, slots=True)
class Said:
    """What a service printed from its start to its end, the spans that came of it, and keys that it gave out."""

    lines: list[str]
    spans: list[SpanSeen]
    keys: list[str]
    leases: list[str]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Said]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(f"named:{TOKEN}\n")
    with Collector() as collector:
        flags = [
            "--log-format",
            "json",
            "--log-level",
            "debug",
            "--token-file",
            str(tokens),
            "--preprocess-workers",
            "1",
        ]
        flags += ["--otlp-traces-endpoint", f"http://{collector.address}", "--trace-sample-ratio", "0"]
        with ProducerServer(cached_checkpoint("qwen2_5_vl"), extra_args=flags, name="log-secrets") as server:
            tickets = _talk(server.address, tokens)
            log = server.log
        lines = log.read_text().splitlines()
        yield Said(lines, collector.spans, [one.key for one in tickets], [one.lease_id for one in tickets])


def _talk(address: str, tokens: Path) -> list[pb.Ticket]:
    """Requests of all kinds: fine, with bad files, bad fields, without a token; a pull; a lease of nobody."""
    client = Producer(address, security=ChannelSecurity(token_file=str(tokens)))
    with work_for(ORIGIN):
        found = client.encode([_image(data) for data in _files()], TIMEOUT_S)
        tickets = [one for one in found if isinstance(one, pb.Ticket)]
        client.fetch(tickets[0], TIMEOUT_S)
        for key, epoch in ((tickets[0].key, FORGED), (f"{MARK.decode()}{FORGED}", tickets[0].epoch)):
            with pytest.raises(ProducerError):
                client.acquire(key=key, epoch=epoch, lease_id=FORGED, transport="grpc", timeout_s=TIMEOUT_S)
    client.close()
    with grpc.insecure_channel(address) as channel:
        stub: Any = EncoderCacheStub(channel)
        settings = {"mm_processor_kwargs": f'{{"a": "{MARK.decode()}"}}', FORGED: FORGED}
        for token in (WRONG_TOKEN, TOKEN):
            metadata = [("authorization", f"Bearer {token}"), ("x-request-id", "not sane \x7e {}")]
            with pytest.raises(grpc.RpcError):
                stub.Encode(
                    pb.EncodeRequest(items=[_image(MARK)], settings=settings), metadata=metadata, timeout=TIMEOUT_S
                )
    return tickets


def _image(data: bytes) -> pb.MediaItem:
    return pb.MediaItem(modality=pb.MODALITY_IMAGE, data=data)


def _files() -> list[bytes]:
    """The mark in pixels, in texts, in places where decoders complain of it; the first two are images."""
    marked = Image.frombytes("RGB", (32, 32), (MARK * 200)[: 32 * 32 * 3])
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Comment", MARK.decode())
    texts.add_itxt("Title", FORGED + MARK.decode())
    png, jpeg, tiff = io.BytesIO(), io.BytesIO(), io.BytesIO()
    marked.save(png, "PNG", pnginfo=texts)
    exif = Image.Exif()
    exif[0x010E] = MARK.decode()
    marked.save(jpeg, "JPEG", exif=exif, comment=MARK)
    marked.save(tiff, "TIFF", description=MARK.decode())
    broken = bytearray(png.getvalue())
    broken[45:45] = MARK
    chunk = len(MARK).to_bytes(4, "big") + b"teXt" + MARK + zlib.crc32(MARK).to_bytes(4, "big")
    return [
        png.getvalue(),
        jpeg.getvalue(),
        tiff.getvalue(),
        bytes(broken),
        png.getvalue()[:33] + chunk + png.getvalue()[33:],
        MARK,
        b"\x89PNG\r\n\x1a\n" + MARK,
        b"<svg>" + MARK + b"</svg>",
        FORGED.encode() + MARK,
    ]


def test_every_line_parses_and_has_its_fields(said: Said) -> None:
    assert len(said.lines) > 20
    for line in said.lines:
        found = json.loads(line)
        assert found.keys() >= {"time", "level", "logger", "message"}, line
        assert len(line) < 4096
        assert found["logger"] != "forged"


def test_no_line_and_no_span_has_secrets_media_or_whole_keys(said: Said) -> None:
    output = "\n".join([*said.lines, *map(str, said.spans)])
    marks = [TOKEN, WRONG_TOKEN, MARK.decode(), MARK.hex(), *said.keys, *said.leases, "Bearer", "authorization"]
    marks.append(base64.b64encode(MARK).decode()[:20])
    assert [mark for mark in marks if mark in output] == []
    assert said.keys[0][:16] in output  # there is something to be found


def test_lines_of_a_request_have_its_ids(said: Said) -> None:
    lines = [json.loads(line) for line in said.lines]
    ours = [one for one in lines if one.get("request_id") == "id-of-mine"]
    assert {one["method"] for one in ours if "method" in one} == {"Encode", "Acquire", "Fetch", "Release"}
    assert {one["trace_id"] for one in ours} == {TRACE_ID}
    codes = {(one["method"], one["code"], one.get("reason")) for one in lines if "method" in one}
    assert ("Encode", "UNAUTHENTICATED", "UNAUTHENTICATED") in codes
    assert ("Encode", "FAILED_PRECONDITION", "SETTINGS_MISMATCH") in codes
    assert ("Acquire", "FAILED_PRECONDITION", "EPOCH_MISMATCH") in codes
    made = {one["request_id"] for one in lines if one.get("reason") in ("UNAUTHENTICATED", "SETTINGS_MISMATCH")}
    assert {len(one) for one in made} == {32}


def test_other_packages_lines_come_in_the_same_form(said: Said) -> None:
    loggers = {json.loads(line)["logger"] for line in said.lines}
    assert any(name.startswith("vllm.") for name in loggers)
    assert "producer.calls" in loggers


def test_the_whole_way_is_one_trace(said: Said) -> None:
    spans = [one for one in said.spans if one.trace_id == TRACE_ID]
    encode = named(spans, "Encode")
    assert encode.parent_id == "b" * 16
    items = {one.span_id: one for one in spans if one.name == "item"}
    assert {one.parent_id for one in items.values()} == {encode.span_id}
    assert len(items) == len(_files())
    for name in ("preprocess", "queue", "step", "publish"):
        assert {one.parent_id for one in spans if one.name == name} <= items.keys()
        assert any(one.name == name for one in spans)
    assert {one.attributes["path"] for one in spans if one.name == "step"} == {"eager"}
    assert {one.trace_id for one in said.spans} == {TRACE_ID}  # the ratio is 0: others are not sampled
