"""Who may call: tokens, the name that a client is counted by, and what is said of open doors at start."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from producer.app import _listen
from producer.config import ServeConfig
from producer.metrics import Metrics
from producer.security import TokenInterceptor, client_of, server_credentials, warn_of_open_doors
from producer.wire.contract import SERVICE_NAME
from producer.wire.credential_files import CredentialFileError, is_loopback
from tests.kit.certificates import Authority

TOKEN, SECOND = "a" * 32, "b" * 32
ENCODE = f"/{SERVICE_NAME}/Encode"
HEALTH = "/grpc.health.v1.Health/Check"


class Calls:
    """Begins calls at an interceptor, each in a context of its own, as gRPC does."""

    def __init__(self, path: Path) -> None:
        self._interceptor = TokenInterceptor(str(path))

    async def client(self, *headers: Any, method: str = ENCODE) -> str | None:
        """Whom the call is counted for; None where it is refused."""
        return await asyncio.create_task(self._client(headers, method))

    async def _client(self, headers: Any, method: str) -> str | None:
        details: Any = SimpleNamespace(method=method, invocation_metadata=[("authorization", one) for one in headers])

        async def handler(details: Any) -> str:
            return client_of(context())

        found = await self._interceptor.intercept_service(handler, details)
        return found if isinstance(found, str) else None


def context(*identities: bytes, peer: str = "ipv4:10.0.0.1:40000") -> Any:
    return SimpleNamespace(peer_identities=lambda: identities or None, peer=lambda: peer)


def write(path: Path, *lines: str) -> None:
    path.write_text("\n".join(lines))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    write(tmp_path / "tokens", f"team-a:{TOKEN}", SECOND)
    return tmp_path / "tokens"


async def test_a_token_lets_in_and_names_the_client(tokens: Path) -> None:
    calls = Calls(tokens)
    assert await calls.client(f"Bearer {TOKEN}") == "token team-a"
    assert await calls.client(f"bearer {TOKEN}") == "token team-a"
    assert await calls.client(f"Bearer {SECOND}") == "host 10.0.0.1"  # many may share one without a name


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (TOKEN,),
        ("Bearer ",),
        (f"Bearer {TOKEN[:-1]}",),
        (f"Bearer {TOKEN}a",),
        (f"Bearer  {TOKEN}",),
        (f"Bearer team-a:{TOKEN}",),
        (f"Basic {TOKEN}",),
        ("Bearer ü",),
        (f"Bearer {TOKEN}".encode(),),
        (f"Bearer {TOKEN}", f"Bearer {TOKEN}"),
    ],
)
@pytest.mark.parametrize(
    "method",
    [ENCODE, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.HealthX/A", ""],
)
async def test_without_one_nothing_but_health_is_open(tokens: Path, headers: tuple[Any, ...], method: str) -> None:
    calls = Calls(tokens)
    assert await calls.client(*headers, method=method) is None
    assert await calls.client(*headers, method=HEALTH) is not None


async def test_tokens_are_rotated_while_it_runs(tokens: Path) -> None:
    calls = Calls(tokens)
    write(tokens, f"team-a:{'c' * 32}", f"team-a:{TOKEN}")
    assert await calls.client(f"Bearer {TOKEN}") == await calls.client(f"Bearer {'c' * 32}") == "token team-a"
    write(tokens, f"team-a:{'c' * 32}")
    assert await calls.client(f"Bearer {TOKEN}") is None
    write(tokens, "half a")
    assert await calls.client(f"Bearer {'c' * 32}") == "token team-a"


async def test_a_name_does_not_reach_the_next_call(tokens: Path) -> None:
    calls = Calls(tokens)
    assert await calls.client(f"Bearer {TOKEN}") == "token team-a"
    assert await calls.client(method=HEALTH) == "host 10.0.0.1"


@pytest.mark.parametrize(
    ("identities", "peer", "client"),
    [
        ((b"b.example", b"a.example"), "ipv4:10.0.0.1:1", "certificate a.example,b.example"),
        ((b"spiffe://x/\xff",), "ipv4:10.0.0.1:1", "certificate spiffe://x/�"),
        ((), "ipv4:10.0.0.1:40000", "host 10.0.0.1"),
        ((), "ipv6:%5Bfd00::1%5D:40000", "host %5Bfd00::1%5D"),
        ((), "unix:/run/x", "host unix:/run/x"),
    ],
)
def test_whom_a_call_is_counted_for(identities: tuple[bytes, ...], peer: str, client: str) -> None:
    assert client_of(context(*identities, peer=peer)) == client


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "encoder", "localhost.example", "")],
)
def test_loopback(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it


@pytest.mark.parametrize(
    ("host", "has", "said"),
    [
        ("0.0.0.0", "", "neither token_file nor tls_client_ca is set: whoever reaches 0.0.0.0 may use the service"),
        ("0.0.0.0", "tls", "neither token_file nor tls_client_ca is set"),
        (
            "0.0.0.0",
            "tokens",
            "token_file is set and tls_cert is not: on 0.0.0.0, tokens and media travel in the clear",
        ),
        ("0.0.0.0", "tls tokens", ""),
        ("0.0.0.0", "tls client_ca", ""),
        ("127.0.0.1", "", ""),
        ("127.0.0.1", "tokens", ""),
    ],
)
def test_open_doors_are_said(host: str, has: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    words = has.split()
    warn_of_open_doors(host, has_tls="tls" in words, has_client_ca="client_ca" in words, has_tokens="tokens" in words)
    assert len(caplog.records) == bool(said)
    assert said in caplog.text


async def test_it_listens_and_says_so(caplog: pytest.LogCaptureFixture, tokens: Path) -> None:
    with caplog.at_level(logging.WARNING):
        for settings in ({}, {"token_file": str(tokens)}):
            server, _ = _listen(ServeConfig(model="tiny", listen="localhost:0", **settings), Metrics())
            await server.stop(0)
    assert caplog.messages == []


def test_without_a_certificate_there_is_no_tls() -> None:
    assert server_credentials("", "", "") is None


@pytest.mark.parametrize("settings", [{"tls_cert": "none.crt", "tls_key": "none.key"}, {"token_file": "none"}])
async def test_a_file_that_is_missing_at_start_is_named(settings: dict[str, str], tmp_path: Path) -> None:
    paths = {name: str(tmp_path / file) for name, file in settings.items()}
    name, path = next(iter(paths.items()))
    with pytest.raises(CredentialFileError, match=f"{name} {path}: No such file or directory"):
        _listen(ServeConfig(model="tiny", listen="127.0.0.1:0", **paths), Metrics())


async def test_a_port_that_is_taken_is_said_with_tls_too(tmp_path: Path) -> None:
    cert, key = Authority().issue("server").write(tmp_path, "server")
    server, address = _listen(ServeConfig(model="tiny", listen="127.0.0.1:0"), Metrics())
    with pytest.raises(OSError, match=f"listen is {address}: the address cannot be used"):
        _listen(ServeConfig(model="tiny", listen=address, tls_cert=cert, tls_key=key), Metrics())
    await server.stop(0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_cert": "c"}, "tls_cert is 'c' and tls_key ''; one needs the other"),
        ({"tls_key": "k"}, "tls_cert is '' and tls_key 'k'; one needs the other"),
        ({"tls_client_ca": "a"}, "tls_client_ca is 'a'; it needs tls_cert and tls_key"),
        ({"max_client_items": 63}, "max_client_items is 63; allowed are 0 and max_items_per_request, 64, or more"),
        ({"max_client_items": -1}, "max_client_items is -1; allowed are 0 to 100000"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServeConfig(model="tiny", **settings)


def test_a_share_as_large_as_a_request_will_do() -> None:
    assert ServeConfig(model="tiny", max_client_items=8, max_items_per_request=8).max_client_items == 8
