"""The flags of `ec-producer serve` and the settings of the shim, as values of the chart."""

import dataclasses
from typing import Any

from consumer_shim.config import TRANSPORTS, ShimConfig
from producer.config import ServeConfig
from producer.transport.registry import MOONCAKE_PROTOCOLS
from tests.chart.schema_words import FLAG, Schema, closed, number, one_of, text, whole

OWNED = {
    "model": "`model.name`, `model.path`",
    "listen": "`ports.grpc`, `ipv6`",
    "metrics_listen": "`ports.metrics`, `ipv6`",
    "advertise": "`advertiseHost`",
    "tls_cert": "`tls.enabled`, `tls.secret`",
    "tls_key": "`tls.enabled`, `tls.secret`",
    "tls_client_ca": "`tls.clientCaSecret`",
    "token_file": "`tokens.secret`",
    "transport": "`transports.nixl.enabled`, `transports.mooncake.enabled`",
    "nixl_devices": "`transports.nixl.devices`",
    "mooncake_host": "always the pod's address",
    "mooncake_protocol": "`transports.mooncake.protocol`",
    "revision": "`model.revision`",
    "trust_remote_code": "`model.trustRemoteCode`",
    "publish_files": "`files.claim`",
    "drain_s": "`drain.deadlineSeconds`",
}
"""Settings that are not in `config`, and the values that decide them."""
SHIM_OWNED = ("producers", "mooncake_host", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file")
"""Settings of the shim that the chart decides."""

_FLAG_PATTERNS = {"otlp_traces_endpoint": r"^((https?://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5})?$"}
"""What a flag of text takes, where that is known."""
_SIZE = r"^[0-9]{1,20}(\.[0-9]{1,20})? ?(KiB|MiB|GiB|TiB|)$"


def flag_name(setting: str) -> str:
    """Of a field of ServeConfig."""
    return setting.replace("_", "-")


def _flag(field: "dataclasses.Field[Any]") -> Schema:
    """What `config` takes for a setting."""
    meta = field.metadata
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[operator]
    found: Schema = {"description": meta["help"]}
    if isinstance(default, bool):
        return found | FLAG
    if isinstance(default, dict):
        return found | {"type": "object"}
    if meta["choices"]:
        return found | one_of(*meta["choices"])
    if meta["size"]:
        return found | {
            "type": ["string", "integer"],
            "pattern": _SIZE,
            "minimum": meta["low"],
            "maximum": meta["high"],
        }
    if isinstance(default, int):
        return found | whole(int(meta["low"]), int(meta["high"]))
    pattern = _FLAG_PATTERNS.get(field.name, "")
    return found | (number(meta["low"], meta["high"]) if isinstance(default, float) else text(pattern))


def config_schema() -> Schema:
    """Of `config`."""
    fields = (field for field in dataclasses.fields(ServeConfig) if field.name not in OWNED)
    return closed(**{flag_name(field.name): _flag(field) for field in fields})


def drain_schema() -> Schema:
    """Of `drain.deadlineSeconds`."""
    meta = next(field.metadata for field in dataclasses.fields(ServeConfig) if field.name == "drain_s")
    return number(meta["low"], meta["high"])


def shim_schema() -> Schema:
    """Of `consumer.shim`."""
    found: dict[str, Schema] = {}
    for field in dataclasses.fields(ShimConfig):
        if field.name in SHIM_OWNED:
            continue
        meta, default = field.metadata, field.default
        if meta:
            found[field.name] = (whole if isinstance(default, int) else number)(meta["low"], meta["high"])
        else:
            found[field.name] = text()
    found["transport"] = one_of(*TRANSPORTS)
    found["mooncake_protocol"] = one_of(*MOONCAKE_PROTOCOLS)
    found["fingerprint"] = text("^([0-9a-f]{64})?$")
    return closed(**found)
