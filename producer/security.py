"""Who may talk to the service, and as whom: TLS, bearer tokens, the name that a client is counted by."""

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from grpc_health.v1 import health

from producer.errors import AuthenticationError
from producer.messages import abort
from producer.wire.contract import Reason
from producer.wire.credential_files import CredentialFiles, Tls, is_loopback, tls_files, token_file

logger = logging.getLogger(__name__)

TLS_OPTIONS = (("grpc.max_connection_age_ms", 3_600_000),)
"""Of a server with TLS: after an hour clients connect anew, so that a certificate must be valid still."""

_OPEN = f"/{health.SERVICE_NAME}/"
_token_name: ContextVar[str] = ContextVar("token_name", default="")


def server_credentials(cert: str, key: str, client_ca: str) -> grpc.ServerCredentials | None:
    """Of a server whose certificate is in these PEM files; None without one.

    Each connection gets what the files say when it begins. With `client_ca` clients need a certificate that it signed.

    Raises:
        CredentialFileError: a file cannot be used.
    """
    if not cert:
        return None
    files = tls_files(("tls_cert", cert), ("tls_key", key), ("tls_client_ca", client_ca))
    last = files.current()

    def changed() -> Any:
        """For gRPC, on a thread of its own before each handshake: None where nothing is new."""
        nonlocal last
        now = files.current()
        if now == last:
            return None
        last = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(_configuration(last), changed, bool(client_ca))


def add_port(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    """Takes the port of `listen`, with TLS where there are credentials. RuntimeError: it cannot be had."""
    if credentials is None:
        return server.add_insecure_port(listen)
    return server.add_secure_port(listen, credentials)


def warn_of_open_doors(host: str, *, has_tls: bool, has_client_ca: bool, has_tokens: bool) -> None:
    """Says at start what anybody who reaches the address could do. Loopback is a host's own affair."""
    if is_loopback(host):
        return
    if has_tokens and not has_tls:
        logger.warning("token_file is set and tls_cert is not: on %s, tokens and media travel in the clear", host)
    elif not (has_tokens or has_client_ca):
        logger.warning("neither token_file nor tls_client_ca is set: whoever reaches %s may use the service", host)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls in that carry a token of the file; health checks need none."""

    def __init__(self, path: str) -> None:
        """Raises CredentialFileError where the file cannot be used."""
        self._tokens: CredentialFiles[dict[str, str]] = token_file(path)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        if not details.method.startswith(_OPEN):
            name = self._name([value for key, value in details.invocation_metadata if key == "authorization"])
            if name is None:
                return _REFUSAL
            _token_name.set(name)
        return await continuation(handler_call_details)

    def _name(self, headers: list[str | bytes]) -> str | None:
        """The name of the token that a call carries; None where it carries none that is known."""
        if len(headers) != 1 or not isinstance(headers[0], str):
            return None
        scheme, _, given = headers[0].partition(" ")
        if scheme.lower() != "bearer":
            return None
        found = None
        for token, name in self._tokens.current().items():  # all of them: how long it takes says nothing
            if hmac.compare_digest(token.encode(), given.encode()):
                found = name
        return found


def client_of(context: Any) -> str:
    """Whom the call of this context is counted for: its certificate's names, its token's, or its host."""
    names = context.peer_identities() or ()
    if names:
        return "certificate " + ",".join(sorted(name.decode("utf-8", "replace") for name in names))
    token = _token_name.get()
    return f"token {token}" if token else f"host {_host(context.peer())}"


def _host(peer: str) -> str:
    """Of gRPC's "ipv4:127.0.0.1:40000"; other forms as they are."""
    kind, _, address = peer.partition(":")
    return address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer


def _configuration(tls: Tls) -> Any:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.cert)], tls.ca or None)


async def _refuse(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    error = AuthenticationError(
        Reason.UNAUTHENTICATED, "the call has no token that is known here; expected 'authorization: Bearer TOKEN'"
    )
    await abort(context, error)
    yield


_REFUSAL: Any = grpc.stream_stream_rpc_method_handler(_refuse)
"""Of every kind of call: nothing that the client sends is read."""
