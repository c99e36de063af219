"""The transports that need a library, by name; their modules are imported when they are asked for."""

import importlib
from collections.abc import Mapping

from producer.memory.region import SharedRegion
from producer.transport.base import Outlet, Reader

_MODULES = {"nixl": "producer.transport.nixl", "mooncake": "producer.transport.mooncake"}
LIBRARY_TRANSPORTS = tuple(_MODULES)
"""Most capable first."""
MOONCAKE_PROTOCOLS = ("tcp", "rdma")


def open_outlet(name: str, region: SharedRegion, options: Mapping[str, str]) -> Outlet:
    """The producer's end of transport `name` over `region`; its module says which `options` it takes.

    Raises:
        TransportUnavailableError: its library is missing, or cannot be used on this machine.
        TransportError: it did not start.
    """
    outlet: Outlet = importlib.import_module(_MODULES[name]).open_outlet(region, options)
    return outlet


def open_reader(name: str, region: SharedRegion, options: Mapping[str, str]) -> Reader:
    """A consumer's end that lands in `region`; otherwise as `open_outlet`."""
    reader: Reader = importlib.import_module(_MODULES[name]).open_reader(region, options)
    return reader
