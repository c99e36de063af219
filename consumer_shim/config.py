"""Settings of the shim: vLLM's `ec_connector_extra_config`, the one place for middleware and connector."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRANSPORTS = ("auto", "nixl", "grpc")


def _number(default: float, help: str, low: float, high: float) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True, slots=True)
class ShimConfig:
    """All settings. `ValueError` names the field, its value and what is allowed."""

    producers: tuple[str, ...]
    """host:port of each producer; requests go to them in turn. Nothing else is ever connected to."""
    transport: str = "auto"
    """What to pull with: "nixl", "grpc", or "auto" for the most capable one that both sides have."""
    nixl_devices: str = ""
    """Network devices that NIXL may use, as UCX_NET_DEVICES takes them; "" for all."""
    region_bytes: int = _number(1 << 30, "host memory that embeddings land in", 1 << 20, 1 << 46)
    encode_timeout_s: float = _number(60.0, "seconds for encoding a request's media", 0.1, 3600)
    pull_timeout_s: float = _number(20.0, "seconds from the first wait for an embedding to its failure", 0.1, 3600)
    max_pulls: int = _number(8, "pulls at once", 1, 256)
    max_body_bytes: int = _number(256 << 20, "largest request body with media", 1, 1 << 31)

    def __post_init__(self) -> None:
        if not self.producers:
            raise ValueError("producers is empty; expected a list with the host:port of at least one producer")
        for address in self.producers:
            host, _, port = address.rpartition(":")
            if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
                raise ValueError(f"producers has {address!r}; expected host:port")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport is {self.transport!r}; allowed are {', '.join(TRANSPORTS)}")
        if not isinstance(self.nixl_devices, str):
            raise ValueError(f"nixl_devices is {self.nixl_devices!r}; expected text")
        for field in dataclasses.fields(self):
            if "low" in field.metadata:
                _check_number(field, getattr(self, field.name))

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
