"""Credentials in files, as both ends of a connection read them: certificates and keys in PEM, bearer tokens.

What a file says is never in an error or in the log.
"""

import ipaddress
import logging
import os
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

logger = logging.getLogger(__name__)

_MAX_FILE_BYTES = 1 << 20
_MAX_TOKENS = 1024
_TOKEN_LINE = re.compile(r"(?:([\w.-]{1,64}):)?([\w.~+/-]{16,512}={0,2})", re.ASCII)
TOKEN_FORM = "one a line, 'token' or 'name:token': a token has 16 to 512 of A-Z a-z 0-9 - . _ ~ + /"

T = TypeVar("T")


class CredentialFileError(OSError):
    """A file cannot be read, or is not what it should be. The message names the setting and the file."""


class CredentialFiles(Generic[T]):
    """What some files say. A change on disk holds from the next look on; thread-safe.

    A change that makes no sense, such as a file half written or a key beside another's certificate, is logged once and
    looked at again the next time; until then holds what was before.
    """

    def __init__(self, files: Sequence[tuple[str, str]], parse: Callable[..., T]) -> None:
        """`files` are pairs of a setting's name and a path; `parse` takes their bytes and raises ValueError.

        Raises:
            CredentialFileError: they make no sense now.
        """
        self._files = files
        self._parse = parse
        self._lock = threading.Lock()
        self._complaint = ""
        self._stamps, self._value = self._read()

    def current(self) -> T:
        """What they say now."""
        with self._lock:
            try:
                if self._look() != self._stamps:
                    self._stamps, self._value = self._read()
                    logger.info("%s read again", self._name())
                self._complaint = ""
            except CredentialFileError as error:
                if str(error) != self._complaint:
                    logger.error("%s; what was there before stays in use", error)
                self._complaint = str(error)
            return self._value

    def _read(self) -> tuple[list[tuple[int, ...]], T]:
        stamps = self._look()  # first: what changes meanwhile is read again
        contents = [_content(name, path) for name, path in self._files]
        try:
            return stamps, self._parse(*contents)
        except ValueError as error:
            raise CredentialFileError(f"{self._name()}: {error}") from None

    def _look(self) -> list[tuple[int, ...]]:
        return [_stamp(name, path) for name, path in self._files]

    def _name(self) -> str:
        return ", ".join(f"{name} {path}" for name, path in self._files)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM of one end: its certificate chain and key, and whom it trusts; empty where it has none."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes


def tls_files(cert: tuple[str, str], key: tuple[str, str], ca: tuple[str, str]) -> CredentialFiles[Tls]:
    """The files of one end; each is a pair of a setting's name and a path, "" for none.

    Raises:
        CredentialFileError: they cannot be used.
    """
    given = [one for one in (cert, key, ca) if one[1]]

    def parse(*contents: bytes) -> Tls:
        found = dict(zip(given, contents, strict=True))
        tls = Tls(found.get(cert, b""), found.get(key, b""), found.get(ca, b""))
        _check(tls)
        return tls

    return CredentialFiles(given, parse)


def token_file(path: str) -> CredentialFiles[dict[str, str]]:
    """The tokens of a file, each with its name, "" where it has none, in the file's order.

    Raises:
        CredentialFileError: it cannot be used.
    """
    return CredentialFiles([("token_file", path)], parse_tokens)


def parse_tokens(content: bytes) -> dict[str, str]:
    """Names by token; empty lines and those that begin with # say nothing.

    Raises:
        ValueError: names the line.
    """
    tokens: dict[str, str] = {}
    for number, line in enumerate(content.decode("ascii", "replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _TOKEN_LINE.fullmatch(line.strip())
        if not match:
            raise ValueError(f"line {number} is no token; expected {TOKEN_FORM}")
        tokens[match[2]] = match[1] or ""
    if not 1 <= len(tokens) <= _MAX_TOKENS:
        raise ValueError(f"it has {len(tokens)} tokens; expected 1 to {_MAX_TOKENS}, {TOKEN_FORM}")
    return tokens


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _content(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CredentialFileError(f"{name} {path}: {error.strerror}") from None
    if not content:
        raise CredentialFileError(f"{name} {path} is empty")
    if len(content) > _MAX_FILE_BYTES:
        raise CredentialFileError(f"{name} {path} has more than {_MAX_FILE_BYTES} bytes")
    return content


def _stamp(name: str, path: str) -> tuple[int, ...]:
    """Differs when the file, or what a link on the way to it points to, was changed."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise CredentialFileError(f"{name} {path}: {error.strerror}") from None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _check(tls: Tls) -> None:
    """Raises ValueError for what a handshake would fail with: gRPC itself finds out by then only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if tls.cert:
            with _in_memory(tls.cert) as cert, _in_memory(tls.key) as key:
                context.load_cert_chain(cert, key, password=_no_password)
        if tls.ca:
            context.load_verify_locations(cadata=tls.ca.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise ValueError(f"they are no certificate and key that fit ({error.reason or 'not PEM'})") from None


def _no_password() -> NoReturn:
    raise ValueError("the key is encrypted; only plain PEM is taken")


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path to `content`, so that what is checked is what was read. It is nowhere on a disk."""
    handle = os.memfd_create("credential")
    try:
        os.write(handle, content)
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)
