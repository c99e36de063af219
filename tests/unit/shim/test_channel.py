"""Channels with TLS and tokens: which settings go together, and what becomes of channels when files change."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from consumer_shim.channel import PLAIN, ChannelSecurity, SecureChannel, aio_channel, sync_channel
from consumer_shim.client import Producer, ProducerError
from producer.wire.credential_files import CredentialFileError
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheServicer, add_EncoderCacheServicer_to_server
from tests.kit.certificates import Authority
from tests.kit.ports import free_port

TOKEN = "a" * 32
BOUND_S = 20.0


class Echo(EncoderCacheServicer):
    """Answers with what a call brought: its token as the model, its certificate's name as the dtype."""

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        headers = dict(context.invocation_metadata())
        names = context.auth_context().get("x509_common_name", [b""])
        return pb.GetModelInfoResponse(model=headers.get("authorization", ""), dtype=names[0].decode())

    def Fetch(self, request: pb.FetchRequest, context: Any) -> Iterator[pb.FetchResponse]:
        for header in dict(context.invocation_metadata()).get("authorization", ""), "end":
            yield pb.FetchResponse(data=header.encode())


@pytest.fixture
def server() -> Iterator[grpc.Server]:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        add_EncoderCacheServicer_to_server(Echo(), server)  # type: ignore[no-untyped-call]
        yield server
        server.stop(0).wait(BOUND_S)


class Ends:
    """A folder with the certificates of a server that wants one of its clients, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.authority.write(folder, "ca")
        self.renew("first")

    def renew(self, name: str) -> None:
        self.authority.issue(name).write(self.folder, "client")

    def security(self, **changes: str) -> ChannelSecurity:
        folder = self.folder
        paths = {"tls_ca": folder / "ca.crt", "tls_cert": folder / "client.crt", "tls_key": folder / "client.key"}
        return ChannelSecurity(**{**{name: str(path) for name, path in paths.items()}, **changes})

    def listen(self, server: grpc.Server) -> str:
        pair = self.authority.issue("server")
        credentials = grpc.ssl_server_credentials([(pair.key, pair.cert)], self.authority.cert, True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        return f"127.0.0.1:{port}"


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(tmp_path)


def test_by_default_it_is_a_channel_of_grpc() -> None:
    channel = sync_channel("127.0.0.1:1", PLAIN, ())
    assert isinstance(channel, grpc.Channel)
    channel.close()


async def test_by_default_it_is_one_of_grpc_for_an_event_loop_too() -> None:
    channel = aio_channel("127.0.0.1:1", PLAIN, ())
    assert isinstance(channel, grpc.aio.Channel)
    await channel.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_ca": "x", "tls_cert": "c"}, "tls_cert is 'c' and tls_key ''; one needs the other"),
        ({"tls_ca": "x", "tls_key": "k"}, "tls_cert is '' and tls_key 'k'; one needs the other"),
        ({"tls_cert": "c", "tls_key": "k"}, "tls_cert is 'c'; it needs tls_ca"),
        ({"tls_server_name": "n"}, "tls_server_name is 'n'; it needs tls_ca"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ChannelSecurity(**settings)


@pytest.mark.parametrize("settings", [{"tls_ca": "none"}, {"token_file": "none"}])
def test_a_file_that_is_missing_is_named(settings: dict[str, str]) -> None:
    with pytest.raises(CredentialFileError, match=f"{next(iter(settings))} none: No such file or directory"):
        Producer("127.0.0.1:1", security=ChannelSecurity(**settings))


def test_calls_carry_the_token_and_the_certificate(ends: Ends, server: grpc.Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"# mine\nme:{TOKEN}\n{'b' * 32}\n")
    producer = Producer(ends.listen(server), security=ends.security(token_file=str(tmp_path / "token")))
    assert producer.info(BOUND_S) == pb.GetModelInfoResponse(model=f"Bearer {TOKEN}", dtype="first")
    parts = producer.stub.Fetch(pb.FetchRequest(), timeout=BOUND_S)
    assert [part.data for part in parts] == [f"Bearer {TOKEN}".encode(), b"end"]
    (tmp_path / "token").write_text("b" * 32)
    assert producer.info(BOUND_S).model == f"Bearer {'b' * 32}"
    producer.close()


def test_a_new_certificate_is_for_new_calls(ends: Ends, server: grpc.Server) -> None:
    producer = Producer(ends.listen(server), security=ends.security())
    begun = producer.stub.Fetch(pb.FetchRequest(), timeout=BOUND_S)
    for name in ("second", "third"):
        ends.renew(name)
        assert producer.info(BOUND_S).dtype == name
        (ends.folder / "client.key").write_bytes(b"half")
        assert producer.info(BOUND_S).dtype == name
    assert [part.data for part in begun] == [b"", b"end"]
    producer.close()


def test_channels_of_old_certificates_are_not_kept_for_ever(ends: Ends) -> None:
    opened: list[str] = []
    closed: list[str] = []

    class Kind:
        """In grpc's place: it connects to nothing, and counts."""

        def secure_channel(self, address: str, credentials: Any, options: Any) -> Any:
            opened.append(address)

            class Channel:
                name = str(len(opened))

                def close(self) -> None:
                    closed.append(self.name)

            return Channel()

    channel = SecureChannel(Kind(), "a:1", ends.security(), ())
    for number in range(1, 6):
        ends.renew(str(number))
        assert channel.current() is channel.current()
    assert len(opened) == 6
    assert closed == ["1", "2", "3"]
    channel.close()
    assert closed == ["1", "2", "3", "4", "5", "6"]
    ends.renew("late")
    channel.current()
    assert len(opened) == 6


@pytest.mark.parametrize("has_tls", [True, False])
def test_a_call_after_the_end_says_so(ends: Ends, tmp_path: Path, has_tls: bool) -> None:
    (tmp_path / "token").write_text(TOKEN)
    security = ends.security() if has_tls else ChannelSecurity(token_file=str(tmp_path / "token"))
    producer = Producer(f"127.0.0.1:{free_port()}", security=security)
    producer.close()
    with pytest.raises(ProducerError, match="the client is closed"):
        producer.info(1.0)


@pytest.mark.parametrize(
    ("address", "is_said"),
    [("encoder:50051", True), ("10.0.0.1:1", True), ("127.0.0.1:1", False), ("[::1]:1", False), ("localhost:1", False)],
)
def test_a_token_in_the_clear_is_said(
    address: str, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with caplog.at_level(logging.WARNING):
        sync_channel(address, ChannelSecurity(token_file=str(tmp_path / "token")), ()).close()
    assert bool(caplog.messages) is is_said
    assert all(TOKEN not in one for one in caplog.messages)
