"""Channels to a producer, with TLS and a bearer token if they are set. Files that changed hold for new calls."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from producer.wire.credential_files import CredentialFiles, Tls, is_loopback, tls_files, token_file

logger = logging.getLogger(__name__)

_MAX_OLD_CHANNELS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSecurity:
    """How a client reaches its producers; everything is "" by default, for plaintext and no token."""

    tls_ca: str = ""
    """PEM file of those who sign producers' certificates; it turns TLS on."""
    tls_cert: str = ""
    """PEM file of this side's own certificate chain, for producers that want one."""
    tls_key: str = ""
    """PEM file of that certificate's key."""
    tls_server_name: str = ""
    """Name that producers' certificates have, where it is not the host of their address."""
    token_file: str = ""
    """File with a bearer token, 'token' or 'name:token'; of several lines, the first counts."""

    def __post_init__(self) -> None:
        """ValueError names what does not go together."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError(f"tls_cert is {self.tls_cert!r} and tls_key {self.tls_key!r}; one needs the other")
        for name in ("tls_cert", "tls_server_name"):
            if getattr(self, name) and not self.tls_ca:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it needs tls_ca")


PLAIN = ChannelSecurity()


def sync_channel(address: str, security: ChannelSecurity, options: Sequence[tuple[str, Any]]) -> Any:
    """A channel to `address` (host:port), for a generated stub; it connects at the first call.

    Raises:
        CredentialFileError: a file of `security` cannot be used.
    """
    if security == PLAIN:
        return grpc.insecure_channel(address, options=options)
    return SecureChannel(grpc, address, security, options)


def aio_channel(address: str, security: ChannelSecurity, options: Sequence[tuple[str, Any]]) -> Any:
    """As `sync_channel`, for the event loop that runs."""
    if security == PLAIN:
        return grpc.aio.insecure_channel(address, options=options)
    return AsyncSecureChannel(grpc.aio, address, security, options)


class SecureChannel:
    """In a channel's place under a stub: each call goes with what the files say when it begins. Thread-safe.

    gRPC keeps the credentials that a channel was made with, so that a change of certificates needs a new channel. Calls
    that are under way stay on the old one, which ends with the third change.
    """

    def __init__(self, kind: Any, address: str, security: ChannelSecurity, options: Sequence[tuple[str, Any]]) -> None:
        """`kind` is grpc or grpc.aio."""
        self._kind = kind
        self._address = address
        self._options = [*options]
        if security.tls_server_name:
            self._options.append(("grpc.ssl_target_name_override", security.tls_server_name))
        self._tls = _tls_files(security)
        self._tokens = token_file(security.token_file) if security.token_file else None
        if self._tokens and not self._tls and not is_loopback(address.rpartition(":")[0].strip("[]")):
            logger.warning("token_file is set and tls_ca is not: the token travels to %s in the clear", address)
        self._lock = threading.Lock()
        self._made_of = self._tls.current() if self._tls else None
        self._channel = self._connect(self._made_of)
        self._old: deque[Any] = deque()
        self._is_closed = False

    def unary_unary(self, *args: Any, **kwargs: Any) -> "_Method":
        return _Method(self, lambda channel: channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> "_Method":
        return _Method(self, lambda channel: channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> "_Method":
        return _Method(self, lambda channel: channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> "_Method":
        return _Method(self, lambda channel: channel.stream_stream(*args, **kwargs))

    def current(self) -> Any:
        """The channel for a call that begins now."""
        if self._tls is None:
            return self._channel
        with self._lock:
            tls = self._tls.current()
            if tls != self._made_of and not self._is_closed:
                self._old.append(self._channel)
                self._channel, self._made_of = self._connect(tls), tls
                if len(self._old) > _MAX_OLD_CHANNELS:
                    self._retire(self._old.popleft())
            return self._channel

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call that begins now carries."""
        if self._tokens is None:
            return ()
        return (("authorization", f"Bearer {next(iter(self._tokens.current()))}"),)

    def close(self) -> Any:
        """Ends all channels; calls in flight fail."""
        for channel in self._all():
            channel.close()

    def _all(self) -> list[Any]:
        with self._lock:
            self._is_closed = True
            return [*self._old, self._channel]

    def _connect(self, tls: Tls | None) -> Any:
        if tls is None:
            return self._kind.insecure_channel(self._address, options=self._options)
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key or None, tls.cert or None)
        return self._kind.secure_channel(self._address, credentials, options=self._options)

    def _retire(self, channel: Any) -> None:
        channel.close()


class AsyncSecureChannel(SecureChannel):
    """As `SecureChannel`, over channels of one event loop."""

    _closing: "asyncio.Task[None] | None" = None

    async def close(self) -> None:
        """Ends all channels; calls in flight fail."""
        for channel in self._all():
            await channel.close()

    def _retire(self, channel: Any) -> None:
        self._closing = asyncio.get_running_loop().create_task(channel.close())  # held until it is done


class _Method:
    """One of a stub's methods, on whatever channel is current."""

    def __init__(self, channels: SecureChannel, make: Callable[[Any], Any]) -> None:
        self._channels = channels
        self._make = make
        self._made: tuple[Any, Any] = (None, None)  # channel and method; replaced as one

    def __call__(self, *request: Any, metadata: Sequence[tuple[str, Any]] | None = None, **options: Any) -> Any:
        channel = self._channels.current()
        made_for, method = self._made
        if made_for is not channel:
            method = self._make(channel)
            self._made = (channel, method)
        return method(*request, metadata=(*(metadata or ()), *self._channels.metadata()), **options)


def _tls_files(security: ChannelSecurity) -> CredentialFiles[Tls] | None:
    if not security.tls_ca:
        return None
    return tls_files(("tls_cert", security.tls_cert), ("tls_key", security.tls_key), ("tls_ca", security.tls_ca))
