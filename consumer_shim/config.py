"""Settings of the shim: vLLM's `ec_connector_extra_config`, the one place for middleware and connector."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from consumer_shim.channel import ChannelSecurity
from producer.transport.registry import LIBRARY_TRANSPORTS, MOONCAKE_PROTOCOLS
from producer.wire.contract import GRPC_TRANSPORT, SHM_TRANSPORT
from producer.wire.tracing import check_settings as check_tracing

TRANSPORTS = ("auto", SHM_TRANSPORT, *LIBRARY_TRANSPORTS, GRPC_TRANSPORT)

_SECURITY = tuple(field.name for field in dataclasses.fields(ChannelSecurity))


def _number(default: float, help: str, low: float, high: float) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True, slots=True)
class ShimConfig:
    """All settings. `ValueError` names the field, its value and what is allowed."""

    producers: tuple[str, ...]
    """host:port of each producer. An item goes to the one that its content and these addresses name, or, if that has
    no room or is not reached, to the next; one that is down is passed over for 1 to 30 s. Nothing else is ever
    connected to."""
    transport: str = "auto"
    """What to pull with: "nixl", "mooncake", "grpc", or "auto" for the most capable one that both sides have."""
    nixl_devices: str = ""
    """Network devices that NIXL may use, as UCX_NET_DEVICES takes them; "" for all."""
    mooncake_host: str = ""
    """Address that this side's Mooncake announces; needed with "rdma"."""
    mooncake_protocol: str = "tcp"
    """What Mooncake reads go over: "tcp" or "rdma", as at the producers."""
    tls_ca: str = ""
    """PEM file of those who sign producers' certificates; it turns TLS on. Changes of these files are noticed."""
    tls_cert: str = ""
    """PEM file of this server's own certificate chain, for producers that want one."""
    tls_key: str = ""
    """PEM file of that certificate's key."""
    tls_server_name: str = ""
    """Name that producers' certificates have, where it is not the host of their address."""
    token_file: str = ""
    """File with the bearer token that producers want."""
    fingerprint: str = ""
    """Fingerprint that producers must have, 64 hex digits; "" for any, but of several producers the same."""
    region_bytes: int = _number(1 << 30, "host memory that embeddings land in", 1 << 20, 1 << 46)
    encode_timeout_s: float = _number(60.0, "seconds for encoding a request's media", 0.1, 3600)
    pull_timeout_s: float = _number(20.0, "seconds from the first wait for an embedding to its failure", 0.1, 3600)
    max_pulls: int = _number(8, "pulls at once", 1, 256)
    max_body_bytes: int = _number(256 << 20, "largest request body with media", 1, 1 << 31)

    otlp_traces_endpoint: str = ""
    """Where spans go with OTLP over gRPC: host:port, http://host:port, https://host:port, or "" for nowhere."""
    trace_sample_ratio: float = _number(1.0, "share of the traces that begin here", 0, 1)

    def __post_init__(self) -> None:
        if not self.producers:
            raise ValueError("producers is empty; expected a list with the host:port of at least one producer")
        for address in self.producers:
            host, _, port = address.rpartition(":")
            if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
                raise ValueError(f"producers has {address!r}; expected host:port")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport is {self.transport!r}; allowed are {', '.join(TRANSPORTS)}")
        for name in ("nixl_devices", "mooncake_host", "fingerprint", *_SECURITY):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected text")
        if self.mooncake_protocol not in MOONCAKE_PROTOCOLS:
            allowed = ", ".join(MOONCAKE_PROTOCOLS)
            raise ValueError(f"mooncake_protocol is {self.mooncake_protocol!r}; allowed are {allowed}")
        if self.mooncake_protocol == "rdma" and not self.mooncake_host:
            raise ValueError("mooncake_host is empty; with mooncake_protocol 'rdma', name this side's address")
        if not re.fullmatch("([0-9a-f]{64})?", self.fingerprint):
            raise ValueError(f"fingerprint is {self.fingerprint[:80]!r}; expected 64 hex digits in lower case, or ''")
        check_tracing(self.otlp_traces_endpoint, self.trace_sample_ratio)
        _ = self.security
        for field in dataclasses.fields(self):
            if "low" in field.metadata:
                _check_number(field, getattr(self, field.name))

    @property
    def security(self) -> ChannelSecurity:
        """How producers are reached."""
        return ChannelSecurity(**{name: getattr(self, name) for name in _SECURITY})

    @property
    def transport_options(self) -> dict[str, dict[str, str]]:
        """What each transport with a library is told, by its name."""
        mooncake = {"host": self.mooncake_host or "127.0.0.1", "protocol": self.mooncake_protocol}
        return {"nixl": {"devices": self.nixl_devices}, "mooncake": mooncake}

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> "ShimConfig":
        """The settings in `ec_connector_extra_config`.

        Raises:
            ValueError: an unknown or missing key, or a value of the wrong type or out of range.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(extra) - names)
        if unknown:
            raise ValueError(
                f"ec_connector_extra_config has unknown {', '.join(unknown)}; known are {', '.join(sorted(names))}"
            )
        producers = extra.get("producers")
        if not isinstance(producers, list) or not all(isinstance(one, str) for one in producers):
            raise ValueError(f"producers is {producers!r}; expected a list with the host:port of at least one producer")
        return cls(**{**extra, "producers": tuple(producers)})


def _check_number(field: "dataclasses.Field[Any]", value: Any) -> None:
    low, high = field.metadata["low"], field.metadata["high"]
    kinds = (int,) if isinstance(field.default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        whole = " in whole numbers" if kinds == (int,) else ""
        raise ValueError(f"{field.name} is {value!r}; allowed are {low} to {high}{whole}")
