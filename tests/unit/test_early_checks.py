"""What is wrong with a start, said before vLLM is imported; and the port is gRPC's to take meanwhile."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from producer import early_checks
from producer.config import ServeConfig
from producer.wire.credential_files import CredentialFileError

ANY = "127.0.0.1:0"


def test_a_pool_larger_than_the_host_is_refused() -> None:
    config = ServeConfig(model="tiny", listen=ANY, pool_bytes=1 << 46)
    with pytest.raises(OSError, match=r"pool_bytes is 70368744177664; this host has \d+ bytes of memory"):
        early_checks.check(config)


@pytest.mark.parametrize("name", ["tls_cert", "tls_client_ca", "token_file"])
def test_a_file_that_cannot_be_opened_is_named(name: str, tmp_path: Path) -> None:
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.touch()
    tls = {"tls_cert": str(there), "tls_key": str(there)}
    config = ServeConfig(model="tiny", listen=ANY, **{**tls, name: str(missing)})  # type: ignore[arg-type]
    with pytest.raises(CredentialFileError, match=f"{name} {missing}: No such file or directory"):
        early_checks.check(config)
    missing.touch()
    early_checks.check(config)


def test_a_port_that_somebody_listens_on_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        said = f"listen is {listen}: the address cannot be used; is it taken"
        with pytest.raises(OSError, match=said), early_checks.claimed(listen):
            raise AssertionError("unreachable")


def test_a_claimed_port_is_kept_from_others_but_not_from_grpc() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with early_checks.claimed(f"127.0.0.1:{port}"):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        server.stop(None)


@pytest.mark.parametrize("listen", [ANY, "[::1]:0", "localhost:0", "0.0.0.0:0", "[::]:0"])
def test_a_port_that_is_to_be_found_is_claimed_in_any_form(listen: str) -> None:
    with early_checks.claimed(listen):
        pass


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_here_is_left_to_grpc(host: str) -> None:
    with early_checks.claimed(f"{host}:50051"):
        pass
