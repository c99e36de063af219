"""TLS, tokens and clients' shares over real gRPC on loopback, at a server that `serve` would listen with."""

import asyncio
import base64
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from consumer_shim.channel import PLAIN, ChannelSecurity, aio_channel
from consumer_shim.client import CHANNEL_OPTIONS, AsyncProducer, ProducerError
from consumer_shim.config import ShimConfig
from consumer_shim.endpoints import CHAT, BodyEncoder
from consumer_shim.fingerprint import FingerprintPin
from consumer_shim.landing import Landing
from consumer_shim.pull import Pull, PullState
from consumer_shim.rewrite import RequestError, tickets_in
from consumer_shim.tickets import PullTicket
from producer.app import _listen
from producer.config import ServeConfig
from producer.encode_command import encode_files
from producer.metrics import Metrics
from producer.security import TLS_OPTIONS
from producer.wire.block import HEADER_BYTES
from producer.wire.contract import SERVICE_NAME, Reason
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheStub
from tests.integration.rig import FINGERPRINT, SETTINGS, WAIT_S, Rig, bytes_of, eventually, image
from tests.kit.certificates import Authority

TOKEN, SECOND = "a" * 32, "b" * 32
MODEL_CONFIG = SimpleNamespace(
    allowed_local_media_path="", allowed_media_domains=None, multimodal_config=SimpleNamespace(**SETTINGS)
)
"""What the shim reads of vLLM's."""


class Files:
    """A server's and a client's certificates and tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers, self.clients, self.strangers = Authority("servers"), Authority("clients"), Authority("strangers")
        self.client("client", self.clients)
        self.client("stranger", self.strangers)
        self.server("server")
        for name, authority in (("servers", self.servers), ("clients", self.clients), ("strangers", self.strangers)):
            authority.write(folder, f"{name}-ca")
        self.tokens(f"team-a:{TOKEN}", f"team-b:{SECOND}")
        for name in ("a", "b"):
            self.write(f"token-{name}", name * 32)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def client(self, name: str, authority: Authority, **options: Any) -> None:
        authority.issue(name, **options).write(self.folder, name)

    def server(self, name: str, **options: Any) -> None:
        """The server's certificate is for `name` now."""
        self.servers.issue(name, **options).write(self.folder, "server")

    def tokens(self, *lines: str) -> None:
        self.write("tokens", "\n".join(lines))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def count(self, folder: str) -> int:
        return len(os.listdir(self.folder / folder))

    def config(self, *what: str) -> ServeConfig:
        """Of a server with TLS, "mtls" or "tokens"."""
        settings = {}
        if "tls" in what or "mtls" in what:
            settings |= {"tls_cert": self.path("server.crt"), "tls_key": self.path("server.key")}
        if "mtls" in what:
            settings["tls_client_ca"] = self.path("clients-ca.crt")
        if "tokens" in what:
            settings["token_file"] = self.path("tokens")
        return ServeConfig(model="tiny", listen="127.0.0.1:0", **settings)

    def security(self, ca: str = "servers", cert: str = "", token: str = "", name: str = "") -> ChannelSecurity:
        return ChannelSecurity(
            tls_ca=self.path(f"{ca}-ca.crt") if ca else "",
            tls_cert=self.path(f"{cert}.crt") if cert else "",
            tls_key=self.path(f"{cert}.key") if cert else "",
            tls_server_name=name,
            token_file=self.path(token) if token else "",
        )


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def rig(config: ServeConfig, security: ChannelSecurity, **options: Any) -> Rig:
    """With health and reflection, as `serve` adds them."""

    def listen(metrics: Metrics) -> tuple[grpc.aio.Server, str]:
        server, address = _listen(config, metrics)
        statuses = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
        reflection.enable_server_reflection((SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server, address

    return Rig(security=security, listen=listen, **options)


async def outcome_of(call: Any) -> str:
    """The status of a call: its name."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def connected(address: str, security: ChannelSecurity = PLAIN) -> AbstractAsyncContextManager[Any]:
    """A stub over a connection of its own; of many a test's, as each makes one."""

    @asynccontextmanager
    async def connection() -> Any:
        channel = aio_channel(address, security, CHANNEL_OPTIONS)
        try:
            yield channel
        finally:
            await channel.close()

    return connection()


async def info(address: str, security: ChannelSecurity = PLAIN, timeout_s: float = WAIT_S) -> str:
    """The status of a call over a new connection."""
    async with connected(address, security) as channel:
        return await outcome_of(EncoderCacheStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s))


# TLS


async def test_an_embedding_over_mtls_and_tokens(files: Files) -> None:
    security = files.security(cert="client", token="token-a")
    async with rig(files.config("mtls", "tokens"), security) as producer:
        ticket = await producer.ticket(b"photo")
        assert await producer.fetch(ticket) == bytes_of(b"photo")
        assert [one async for one in producer.stub.EncodeStream(iter([pb.EncodeStreamRequest(item=image(b"a"))]))]


@pytest.mark.parametrize(
    ("serves", "client"),
    [
        ("tls", None),
        ("mtls", None),
        ("tls", {"ca": "strangers"}),
        ("mtls", {"ca": "strangers", "cert": "client"}),
        ("mtls", {}),
        ("mtls", {"cert": "stranger"}),
        ("mtls", {"cert": "expired"}),
        ("tls", {"name": "another.example"}),
    ],
)
async def test_who_does_not_fit_has_no_connection(files: Files, serves: str, client: dict[str, str] | None) -> None:
    files.client("expired", files.clients, days=-1)
    good = files.security(cert="client")
    async with rig(files.config(serves), good) as producer:
        security = PLAIN if client is None else files.security(**client)
        assert await info(producer.address, security) == "UNAVAILABLE"
        assert await info(producer.address, good) == "OK"


async def test_a_server_whose_certificate_has_expired_is_not_talked_to(files: Files) -> None:
    files.server("server", days=-1)
    async with rig(files.config("tls"), files.security()) as producer:
        assert await info(producer.address, files.security()) == "UNAVAILABLE"


async def test_a_server_by_another_name_than_its_address(files: Files) -> None:
    files.server("encoder.example", uri="spiffe://example/encoder")
    async with rig(files.config("tls"), PLAIN) as producer:
        assert await info(producer.address, files.security()) == "UNAVAILABLE"
    files.server("encoder.example")
    async with rig(files.config("tls"), PLAIN) as producer:
        assert await info(producer.address, files.security(name="encoder.example")) == "OK"


async def test_a_server_without_tls_does_not_get_a_call(files: Files) -> None:
    async with rig(files.config("tokens"), PLAIN) as producer:
        assert await info(producer.address, files.security(token="token-a")) == "UNAVAILABLE"


async def test_all_of_the_shim_over_mtls_and_tokens(files: Files) -> None:
    """A request's image is encoded, and its embedding pulled, with nothing but the shim's settings."""
    reach = files.security(cert="client", token="token-a")
    async with rig(files.config("mtls", "tokens"), reach) as producer:
        settings = {"producers": [producer.address], "transport": "grpc", "region_bytes": 1 << 20, **asdict(reach)}
        for fingerprint, is_it in ((FINGERPRINT, True), ("e" * 64, False)):
            config = ShimConfig.from_extra_config(settings | {"fingerprint": fingerprint})
            image_url = {"url": f"data:image/png;base64,{base64.b64encode(b'photo').decode()}"}
            parts = [{"type": "image_url", "image_url": image_url}]
            body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
            encoder = BodyEncoder(config, "engine", MODEL_CONFIG)
            if not is_it:
                with pytest.raises(RequestError, match=f"expects fingerprint {fingerprint}"):
                    await encoder.rewrite(CHAT, body)
                continue
            changed, _ = await encoder.rewrite(CHAT, body)
            (ticket,) = tickets_in(json.loads(changed))
            state, rows = await asyncio.to_thread(_pull, config, ticket)
            assert (state, rows) == (PullState.READY, bytes_of(b"photo"))


async def test_the_command_encodes_over_mtls_and_tokens(files: Files) -> None:
    reach = files.security(cert="client", token="token-a")
    files.write("photo.png", "photo")
    photos = [files.folder / "photo.png"]
    async with rig(files.config("mtls", "tokens"), reach) as producer:
        assert await asyncio.to_thread(encode_files, photos, producer.address, files.folder / "out", WAIT_S, reach) == 0
        assert await asyncio.to_thread(encode_files, photos, producer.address, None, WAIT_S, files.security()) == 1
    assert files.count("out") == 1


def _pull(config: ShimConfig, ticket: PullTicket) -> tuple[PullState, bytes]:
    landing = Landing(config)
    try:
        pull = Pull(ticket, landing.store.reserve(ticket.key, ticket.shape.block_bytes), time.monotonic() + WAIT_S)
        landing.start(pull)
        while not pull.is_over:
            time.sleep(0.01)
        start = pull.block.offset + HEADER_BYTES
        return pull.state, bytes(landing.region.view[start : start + ticket.shape.payload_bytes])
    finally:
        landing.close()


# Files that change


async def test_connections_are_renewed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whose certificate holds no more is out after a while. The call under way goes on."""
    assert TLS_OPTIONS == (("grpc.max_connection_age_ms", 3_600_000),)
    monkeypatch.setattr("producer.security.TLS_OPTIONS", (("grpc.max_connection_age_ms", 200),))
    client = files.security(cert="client")
    async with rig(files.config("mtls"), client) as producer:
        call = await producer.begin_step(b"old")
        files.strangers.write(files.folder, "clients-ca")
        for _ in range(int(WAIT_S / 0.05)):
            if await outcome_of(producer.stub.GetModelInfo(pb.GetModelInfoRequest())) == "UNAVAILABLE":
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("the old connection is never renewed")
        producer.device.gate.set()
        assert (await call).outcomes[0].ticket.num_rows == 3


async def test_new_certificates_are_for_new_connections(files: Files) -> None:
    """The old connection, and the call on it, go on."""
    old = files.security(cert="client", name="server")
    async with rig(files.config("mtls"), old) as producer:
        call = await producer.begin_step(b"old")
        files.server("renewed")
        assert await info(producer.address, files.security(cert="client", name="renewed")) == "OK"
        assert await info(producer.address, old) == "UNAVAILABLE"
        producer.device.gate.set()
        assert (await call).outcomes[0].ticket.num_rows == 3
        assert await outcome_of(producer.stub.GetModelInfo(pb.GetModelInfoRequest())) == "OK"


async def test_another_client_authority_is_for_new_connections(files: Files) -> None:
    client, stranger = files.security(cert="client"), files.security(cert="stranger")
    async with rig(files.config("mtls"), client) as producer:
        assert await outcome_of(producer.stub.GetModelInfo(pb.GetModelInfoRequest())) == "OK"
        files.strangers.write(files.folder, "clients-ca")
        assert await info(producer.address, client) == "UNAVAILABLE"
        assert await info(producer.address, stranger) == "OK"
        assert await outcome_of(producer.stub.GetModelInfo(pb.GetModelInfoRequest())) == "OK"


async def test_secrets_are_swapped_as_kubernetes_does(files: Files) -> None:
    for version, name in (("1", "server"), ("2", "renewed")):
        (files.folder / version).mkdir()
        files.servers.issue(name).write(files.folder / version, "tls")
    (files.folder / "now").symlink_to("1")
    config = replace(files.config("tls"), tls_cert=files.path("now/tls.crt"), tls_key=files.path("now/tls.key"))
    async with rig(config, PLAIN) as producer:
        assert await info(producer.address, files.security(name="server")) == "OK"
        _swap(files.folder)
        assert await info(producer.address, files.security(name="renewed")) == "OK"
        assert await info(producer.address, files.security(name="server")) == "UNAVAILABLE"


def _swap(folder: Path) -> None:
    os.symlink("2", folder / "next")
    os.replace(folder / "next", folder / "now")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda files: Path(files.path("server.crt")).write_bytes(b"-----BEGIN CERTIFICATE-----\nMII"),
        lambda files: Path(files.path("server.key")).write_bytes(files.servers.issue("server").key),
        lambda files: Path(files.path("server.key")).unlink(),
    ],
)
async def test_half_a_change_is_none(
    files: Files, spoil: Callable[[Files], object], caplog: pytest.LogCaptureFixture
) -> None:
    security = files.security(name="server")
    async with rig(files.config("tls"), security) as producer:
        spoil(files)
        for _ in range(3):
            assert await info(producer.address, security) == "OK"
        assert len([one for one in caplog.messages if "stays in use" in one]) == 1
        files.server("renewed")
        assert await info(producer.address, files.security(name="renewed")) == "OK"


async def test_a_client_uses_its_own_new_certificate(files: Files) -> None:
    """The server takes others by now; calls under way go on, over the connection that they began on."""
    security = files.security(cert="client")
    async with rig(files.config("mtls"), security) as producer:
        call = await producer.begin_step(b"old")
        files.strangers.write(files.folder, "clients-ca")
        files.client("client", files.strangers)
        assert await outcome_of(producer.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=WAIT_S)) == "OK"
        assert (await asyncio.to_thread(producer.client.info, WAIT_S)).model == "tiny"
        files.clients.write(files.folder, "clients-ca")
        files.client("client", files.clients)
        producer.device.gate.set()
        assert (await call).outcomes[0].ticket.num_rows == 3
        assert await producer.fetch(await producer.ticket(b"photo")) == bytes_of(b"photo")


# Tokens


@pytest.mark.parametrize("tls", ["tls", ""])
async def test_without_a_token_only_health_answers(files: Files, tls: str) -> None:
    config = files.config(tls, "tokens")
    ca = "servers" if tls else ""
    async with rig(config, files.security(ca, token="token-a")) as producer:
        assert await outcome_of(producer.stub.GetModelInfo(pb.GetModelInfoRequest())) == "OK"
        async with connected(producer.address, files.security(ca) if tls else PLAIN) as channel:
            bare: Any = EncoderCacheStub(channel)
            calls = [
                bare.GetModelInfo(pb.GetModelInfoRequest()),
                bare.Encode(pb.EncodeRequest(items=[image(b"x" * 50_000)])),
                bare.Acquire(pb.AcquireRequest()),
                bare.Release(pb.ReleaseRequest()),
                bare.Fetch(pb.FetchRequest()).read(),
                bare.EncodeStream(timeout=WAIT_S).read(),
                _reflection(channel).ServerReflectionInfo().read(),
                bare.GetModelInfo(pb.GetModelInfoRequest(), metadata=[("authorization", f"Bearer {'c' * 32}")]),
            ]
            for call in calls:
                assert await outcome_of(call) == "UNAUTHENTICATED"
            checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
        async with connected(producer.address, files.security(ca, token="token-b")) as channel:
            assert (await _reflect(channel)).list_services_response.service[0].name == SERVICE_NAME
        assert producer.items == []


def _reflection(channel: Any) -> Any:
    return reflection_pb2_grpc.ServerReflectionStub(channel)


def _reflect(channel: Any) -> Any:
    """Only where it is allowed: gRPC's client calls a refusal that comes while it still writes an internal error."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    return _reflection(channel).ServerReflectionInfo(iter([request])).read()


async def test_the_refusal_says_what_is_missing(files: Files) -> None:
    async with rig(files.config("tokens"), PLAIN) as producer:
        with pytest.raises(ProducerError, match="no token that is known here") as raised:
            await producer.encode(b"photo")
        headers = [("authorization", f"Bearer {'secret' * 5}")]
        with pytest.raises(grpc.aio.AioRpcError) as wrong:
            await producer.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=headers)
        assert "secret" not in repr(wrong.value) + str(wrong.value.trailing_metadata())
    assert raised.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert raised.value.reason == Reason.UNAUTHENTICATED


async def test_a_token_is_replaced_without_a_gap(files: Files) -> None:
    async with rig(files.config("tokens"), files.security("", token="token-a")) as producer:
        assert await producer.ticket(b"one")
        files.tokens(f"team-a:{'n' * 32}", f"team-a:{TOKEN}")
        assert await producer.ticket(b"two")
        files.write("token-a", "n" * 32)
        files.tokens(f"team-a:{'n' * 32}")
        assert await producer.ticket(b"three")
        assert await info(producer.address, files.security("", token="token-b")) == "UNAUTHENTICATED"


# Shares


@pytest.mark.parametrize("by", ["certificate", "token", "host"])
async def test_each_client_has_its_share(files: Files, by: str) -> None:
    """One that has its share in hand is refused, another is not, unless they are one by all that is known of them."""
    files.client("other", files.clients)
    what, one, other = {
        "certificate": ("mtls", files.security(cert="client"), files.security(cert="other")),
        "token": ("tokens", files.security("", token="token-a"), files.security("", token="token-b")),
        "host": ("", PLAIN, PLAIN),
    }[by]
    async with rig(files.config(what), one, max_client_items=2) as producer:
        producer.device.gate.clear()
        first = producer.begin(b"1", b"22")
        await eventually(lambda: len(producer.items) == 2)
        reply = await producer.begin(b"333")
        refused = ProducerError.from_status(reply.outcomes[0].error)
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.CLIENT_LIMIT)
        assert refused.retry_delay_s > 0
        async with connected(producer.address, other) as channel:
            stub: Any = EncoderCacheStub(channel)
            begun = asyncio.ensure_future(stub.Encode(pb.EncodeRequest(items=[image(b"4444")]), timeout=WAIT_S))
            if by != "host":
                await eventually(lambda: len(producer.items) == 3)
            else:
                assert ProducerError.from_status((await begun).outcomes[0].error).reason == Reason.CLIENT_LIMIT
            producer.device.gate.set()
            assert [one.ticket.num_rows for one in (await first).outcomes] == [1, 2]
            assert (await begun).outcomes[0].WhichOneof("outcome") == ("error" if by == "host" else "ticket")
        assert (await producer.begin(b"333")).outcomes[0].ticket.num_rows == 3


async def test_a_share_holds_in_a_stream_and_ends_with_a_call_that_is_cancelled(files: Files) -> None:
    async with rig(files.config(), PLAIN, max_client_items=2) as producer:
        producer.device.gate.clear()
        first = producer.begin(b"1", b"22")
        await eventually(lambda: len(producer.items) == 2)
        requests = iter([pb.EncodeStreamRequest(id=7, item=image(b"333"))])
        (answer,) = [one async for one in producer.stub.EncodeStream(requests)]
        assert ProducerError.from_status(answer.outcome.error).reason == Reason.CLIENT_LIMIT
        first.cancel()
        await eventually(lambda: producer.sample("items_total", code="CANCELLED") == 2)
        second = producer.begin(b"4444", b"55555")
        await eventually(lambda: len(producer.items) == 4)
        producer.device.gate.set()
        assert [one.ticket.num_rows for one in (await second).outcomes] == [4, 5]


# Mismatches


async def test_an_encode_of_another_wire_version_is_refused_by_name() -> None:
    async with Rig() as producer:
        for version, found in ((0, "OK"), (1, "OK"), (2, "FAILED_PRECONDITION")):
            call = producer.stub.Encode(pb.EncodeRequest(items=[image(b"a")], wire_version=version))
            assert await outcome_of(call) == found
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await producer.stub.Encode(pb.EncodeRequest(items=[image(b"a")], wire_version=2))
        error = ProducerError.from_call(raised.value)
        assert error.reason == Reason.WIRE_VERSION_MISMATCH
        assert "the client knows wire version 2, this producer has 1" in str(error)


async def test_a_pinned_fingerprint_is_for_encode_and_acquire() -> None:
    async with Rig() as producer:
        ticket = await producer.ticket(b"photo")
        for expected, is_it in (("", True), (FINGERPRINT, True), ("e" * 64, False)):
            client = AsyncProducer(producer.address, pin=FingerprintPin(expected))
            request = pb.AcquireRequest(
                key=ticket.key, epoch=ticket.epoch, transport="grpc", wire_version=1, fingerprint=expected
            )
            if is_it:
                assert len(await client.encode([image(b"photo")], WAIT_S)) == 1
                assert await outcome_of(producer.stub.Acquire(request)) == "OK"
            else:
                with pytest.raises(ProducerError, match=f"expects fingerprint {expected}, this one is f+") as raised:
                    await client.encode([image(b"photo")], WAIT_S)
                assert raised.value.reason == Reason.FINGERPRINT_MISMATCH
                assert await outcome_of(producer.stub.Acquire(request)) == "FAILED_PRECONDITION"
            await client.close()


async def test_the_first_of_several_producers_says_which_model_it_is() -> None:
    async with Rig() as one, Rig() as other:
        other.info.fingerprint = "e" * 64
        pin = FingerprintPin(learns=True)
        clients = [AsyncProducer(producer.address, pin=pin) for producer in (one, other)]
        assert len(await clients[0].encode([image(b"photo")], WAIT_S)) == 1
        with pytest.raises(ProducerError) as raised:
            await clients[1].encode([image(b"photo")], WAIT_S)
        assert raised.value.reason == Reason.FINGERPRINT_MISMATCH
        assert other.items == []
        assert len(await clients[0].encode([image(b"photo")], WAIT_S)) == 1
        for client in clients:
            await client.close()
