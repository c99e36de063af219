"""Loopback ports for servers that tests start."""

import random
import socket

PORTS = range(20_000, 32_000)  # below those that the kernel gives to outgoing connections

_handed_out: set[int] = set()


def free_port() -> int:
    """A port on which nobody listens, and which was not handed out here before."""
    while True:
        port = random.choice(PORTS)
        if port not in _handed_out and _is_free(port):
            _handed_out.add(port)
            return port


def handed_out_ports() -> frozenset[int]:
    return frozenset(_handed_out)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
