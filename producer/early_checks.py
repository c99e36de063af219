"""What can be wrong with a start and is seen before anything slow: a port that is taken, files and memory that are not.

Nothing is read that a process for hostile files must not have, and no gRPC is made: see `producer.fork_server`.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

from producer.config import ServeConfig, split_address
from producer.wire.credential_files import CredentialFileError

_FILES = ("tls_cert", "tls_key", "tls_client_ca", "token_file")
_SAID_NOW = (errno.EADDRINUSE, errno.EACCES)
"""What is wrong with an address otherwise is gRPC's to say, which tries others of the same name."""


@contextlib.contextmanager
def claimed(listen: str) -> Iterator[None]:
    """Keeps the port of `listen` from others meanwhile, but for gRPC, which shares with who does not listen yet.

    Raises:
        OSError: it is taken, or not for us.
    """
    with contextlib.ExitStack() as stack:
        try:
            _bind(listen, stack)
        except OSError as error:
            if error.errno in _SAID_NOW:
                raise address_error(listen) from None
        yield


def address_error(listen: str) -> OSError:
    """What is said where an address cannot be had."""
    return OSError(f"listen is {listen}: the address cannot be used; is it taken?")


def check(config: ServeConfig) -> None:
    """
    Raises:
        CredentialFileError: a file that a setting names cannot be opened.
        OSError: the pool is larger than the host; Linux would promise it, and kill the process when it is used.
    """
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.pool_bytes > host_bytes:
        raise OSError(f"pool_bytes is {config.pool_bytes}; this host has {host_bytes} bytes of memory")
    for name in _FILES:
        path = getattr(config, name)
        if path:
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                raise CredentialFileError(f"{name} {path}: {error.strerror}") from None


def _bind(listen: str, stack: contextlib.ExitStack) -> None:
    host, port = split_address("listen", listen)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    claim = stack.enter_context(socket.socket(family, kind, protocol))
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    claim.bind(address)
