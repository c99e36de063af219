"""The shim's settings: what is taken, and that whatever is refused is named with its value and what is allowed."""

import dataclasses
import re
from typing import Any

import pytest

from consumer_shim.channel import PLAIN, ChannelSecurity
from consumer_shim.config import ShimConfig

PRODUCERS = {"producers": ["localhost:50051"]}


def test_only_producers_must_be_set() -> None:
    config = ShimConfig.from_extra_config(PRODUCERS)
    assert config.producers == ("localhost:50051",)
    assert config == ShimConfig(producers=("localhost:50051",))
    assert config.transport == "auto"


def test_everything_can_be_set() -> None:
    settings = {
        "producers": ["10.0.0.1:1", "[::1]:2", "name:65535"],
        "transport": "nixl",
        "nixl_devices": "eth0,eth1",
        "mooncake_host": "10.0.0.9",
        "mooncake_protocol": "rdma",
        "region_bytes": 1 << 20,
        "encode_timeout_s": 0.1,
        "pull_timeout_s": 3600,
        "max_pulls": 256,
        "max_body_bytes": 1,
        "tls_ca": "/etc/tls/ca.crt",
        "tls_cert": "/etc/tls/tls.crt",
        "tls_key": "/etc/tls/tls.key",
        "tls_server_name": "encoder.example",
        "token_file": "/etc/token",
        "fingerprint": "0123456789abcdef" * 4,
        "otlp_traces_endpoint": "https://collector:4317",
        "trace_sample_ratio": 0.5,
    }
    config = ShimConfig.from_extra_config(settings)
    assert dataclasses.asdict(config) == settings | {"producers": tuple(settings["producers"])}  # type: ignore[arg-type]
    assert set(settings) == {field.name for field in dataclasses.fields(ShimConfig)}


def test_it_cannot_be_changed() -> None:
    config = ShimConfig.from_extra_config(PRODUCERS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.transport = "grpc"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "producers is None; expected a list"),
        ({"producers": "localhost:1"}, "producers is 'localhost:1'; expected a list"),
        ({"producers": ["localhost:1", 5]}, "expected a list with the host:port"),
        ({"producers": []}, "producers is empty; expected a list"),
        ({"producers": ["localhost"]}, "producers has 'localhost'; expected host:port"),
        ({"producers": ["localhost:"]}, "producers has 'localhost:'; expected host:port"),
        ({"producers": [":50051"]}, "producers has ':50051'; expected host:port"),
        ({"producers": ["http://localhost:x"]}, "expected host:port"),
        (PRODUCERS | {"transport": "rdma"}, "transport is 'rdma'; allowed are auto, shm, nixl, mooncake, grpc"),
        (PRODUCERS | {"transport": None}, "transport is None; allowed are auto, shm, nixl, mooncake, grpc"),
        (PRODUCERS | {"mooncake_protocol": "udp"}, "mooncake_protocol is 'udp'; allowed are tcp, rdma"),
        (PRODUCERS | {"mooncake_protocol": "rdma"}, "mooncake_host is empty; with mooncake_protocol 'rdma', name"),
        (PRODUCERS | {"retries": 3, "colour": 1}, "has unknown colour, retries; known are encode_timeout_s, fing"),
        (PRODUCERS | {"fingerprint": "F" * 64}, f"fingerprint is '{'F' * 64}'; expected 64 hex digits in lower case"),
        (PRODUCERS | {"fingerprint": "f" * 65}, "expected 64 hex digits in lower case"),
        (PRODUCERS | {"tls_ca": "a", "tls_cert": "b"}, "tls_cert is 'b' and tls_key ''; one needs the other"),
        (PRODUCERS | {"tls_cert": "b", "tls_key": "c"}, "tls_cert is 'b'; it needs tls_ca"),
        (PRODUCERS | {"tls_server_name": "n"}, "tls_server_name is 'n'; it needs tls_ca"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        ShimConfig.from_extra_config(settings)


RANGES = {
    "region_bytes": (1 << 20, 1 << 46),
    "encode_timeout_s": (0.1, 3600),
    "pull_timeout_s": (0.1, 3600),
    "max_pulls": (1, 256),
    "max_body_bytes": (1, 1 << 31),
}


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_a_range(name: str) -> None:
    low, high = RANGES[name]
    for value in (low, high):
        assert getattr(ShimConfig.from_extra_config(PRODUCERS | {name: value}), name) == value
    for bad in (low - 1, high + 1, float("nan")):
        with pytest.raises(ValueError, match=f"{name} is {bad}; allowed are {low} to {high}"):
            ShimConfig.from_extra_config(PRODUCERS | {name: bad})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("region_bytes", "1GiB"),
        ("pull_timeout_s", None),
        ("max_pulls", [1]),
        ("max_pulls", 1.5),
        ("region_bytes", 2.0**20),
        ("max_pulls", True),
        ("nixl_devices", 5),
        ("nixl_devices", None),
        ("mooncake_host", 5),
        ("tls_ca", None),
        ("token_file", ["a"]),
        ("fingerprint", 0),
        ("mooncake_protocol", None),
    ],
)
def test_a_value_of_another_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}")):
        ShimConfig.from_extra_config(PRODUCERS | {name: value})


def test_how_producers_are_reached() -> None:
    assert ShimConfig.from_extra_config(PRODUCERS).security == PLAIN
    config = ShimConfig.from_extra_config(PRODUCERS | {"tls_ca": "a", "token_file": "t"})
    assert config.security == ChannelSecurity(tls_ca="a", token_file="t")


@pytest.mark.parametrize("address", ["localhost:65536", "localhost:²"])
def test_a_port_that_cannot_be(address: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        ShimConfig.from_extra_config({"producers": [address]})


def test_tracing_is_off_by_default_and_checked() -> None:
    config = ShimConfig.from_extra_config(PRODUCERS)
    assert (config.otlp_traces_endpoint, config.trace_sample_ratio) == ("", 1.0)
    settings = {"otlp_traces_endpoint": "http://collector:4317", "trace_sample_ratio": 0}
    assert ShimConfig.from_extra_config(PRODUCERS | settings).trace_sample_ratio == 0
    with pytest.raises(ValueError, match="otlp_traces_endpoint is 'collector'; expected '' or host:port"):
        ShimConfig.from_extra_config(PRODUCERS | {"otlp_traces_endpoint": "collector"})
    with pytest.raises(ValueError, match="trace_sample_ratio is 2; allowed are 0 to 1"):
        ShimConfig.from_extra_config(PRODUCERS | {"trace_sample_ratio": 2})
