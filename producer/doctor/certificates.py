"""Whether a certificate works, found out by a handshake in memory between two ends of our own."""

import ssl
import time
from dataclasses import dataclass

_EXPIRED, _NOT_YET = 10, 9
_OTHER_NAME = (62, 64)  # a name, or an address
_MAX_TURNS = 16


class CertificateError(Exception):
    """A client would not take it; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a client finds out about it."""

    days_left: float
    has_name: bool
    """Whether it is for the name by which clients are told to connect."""


def examine(cert: str, key: str, name: str) -> Certificate:
    """Of a server with these PEM files, to a client that trusts what is in them and connects to `name`.

    Raises:
        CertificateError: it has expired, or is of no use to a server.
        OSError, ssl.SSLError: the files cannot be read, or do not fit together.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    with open(cert, encoding="ascii", errors="ignore") as file:
        chain = file.read()
    ends_s = _shake(server, chain, "")
    try:
        _shake(server, chain, name)
    except CertificateError:
        return Certificate(_days_left(ends_s), has_name=False)
    return Certificate(_days_left(ends_s), has_name=True)


def shortest_days_left(ca: str) -> float:
    """Until the first of the authorities in a PEM file expires.

    Raises:
        OSError, ssl.SSLError: it cannot be read, or holds none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    return min((_days_left(_time(one["notAfter"])) for one in context.get_ca_certs()), default=float("inf"))


def _shake(server: ssl.SSLContext, chain: str, name: str) -> float:
    """When the certificate ends, in Unix time, after a handshake with a client that asks for `name`, "" for any."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = bool(name)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted, whoever signed it
    client.load_verify_locations(cadata=chain)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there, server_hostname=name or None), server.wrap_bio(there, back, server_side=True)]
    for turn in range(_MAX_TURNS):
        try:
            ends[turn % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            raise CertificateError(_reason(error)) from None
        if turn % 2 == 0:
            return _time((ends[0].getpeercert() or {})["notAfter"])
    raise CertificateError("the handshake does not end")


def _reason(error: ssl.SSLCertVerificationError) -> str:
    said = {_EXPIRED: "it has expired", _NOT_YET: "it is not valid yet"}
    return said.get(error.verify_code, error.verify_message)


def _time(text: object) -> float:
    return float(ssl.cert_time_to_seconds(str(text)))


def _days_left(ends_s: float) -> float:
    return (ends_s - time.time()) / 86400
