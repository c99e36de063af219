"""Settings: what is allowed is kept, what is not is named."""

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.config import ServeConfig, parse_bytes, parse_object, split_address

BOUNDED = [field for field in dataclasses.fields(ServeConfig) if field.metadata.get("low") is not None]
CHOSEN = [field for field in dataclasses.fields(ServeConfig) if field.metadata.get("choices")]


def serve_config(**values: Any) -> ServeConfig:
    return ServeConfig(**{"model": "m", **values})


def name_of(field: "dataclasses.Field[Any]") -> str:
    return field.name


def test_a_model_is_all_that_must_be_said() -> None:
    assert serve_config().transports == ("shm", "grpc")


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(ValueError, match="model is empty; name a folder or a hub model"):
        serve_config(model="")


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        serve_config(nonsense=1)


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        serve_config().listen = "localhost:1"


def test_every_setting_is_explained() -> None:
    for field in dataclasses.fields(ServeConfig):
        assert field.name == "model" or field.metadata["help"], field.name


@pytest.mark.parametrize("field", BOUNDED, ids=name_of)
def test_numbers_are_kept_to_their_ends(field: "dataclasses.Field[Any]") -> None:
    for end in (field.metadata["low"], field.metadata["high"]):
        assert getattr(serve_config(**{field.name: end}), field.name) == end


@pytest.mark.parametrize("field", BOUNDED, ids=name_of)
def test_numbers_beyond_their_ends_are_named(field: "dataclasses.Field[Any]") -> None:
    low, high = field.metadata["low"], field.metadata["high"]
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=f"{field.name} is {value}; allowed are {low} to {high}"):
            serve_config(**{field.name: value})


@pytest.mark.parametrize("field", BOUNDED, ids=name_of)
def test_not_a_number_is_refused(field: "dataclasses.Field[Any]") -> None:
    with pytest.raises(ValueError, match=f"{field.name} is nan"):
        serve_config(**{field.name: float("nan")})


@pytest.mark.parametrize("field", CHOSEN, ids=name_of)
def test_choices_are_named(field: "dataclasses.Field[Any]") -> None:
    bad = ("nonsense",) if isinstance(field.default, tuple) else "nonsense"
    allowed = ", ".join(field.metadata["choices"])
    with pytest.raises(ValueError, match=f"{field.name} is 'nonsense'; allowed are {allowed}"):
        serve_config(**{field.name: bad})


def test_what_both_ends_must_agree_on_is_all_that_decides_processing() -> None:
    processor, decoding = {"max_pixels": 4}, {"image": {"image_mode": "L"}}
    config = serve_config(mm_processor_kwargs=processor, media_io_kwargs=decoding)
    assert config.media_settings == {"mm_processor_kwargs": processor, "media_io_kwargs": decoding}


@pytest.mark.parametrize("name", ["listen", "metrics_listen", "advertise"])
def test_addresses_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 'nowhere'; expected host:port with a port of 0 to 65535"):
        serve_config(**{name: "nowhere"})


def test_no_advertised_address_is_fine() -> None:
    assert serve_config(advertise="").advertise == ""


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        (("grpc",), ()),
        (("nixl",), ("nixl",)),
        (("grpc", "nixl"), ("nixl",)),
        (("nixl", "nixl", "shm"), ("nixl",)),
        (("mooncake", "grpc", "nixl"), ("nixl", "mooncake")),
    ],
)
def test_shared_memory_is_always_offered_first_and_grpc_last(asked: tuple[str, ...], offered: tuple[str, ...]) -> None:
    assert serve_config(transport=asked).transports == ("shm", *offered, "grpc")


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, "127.0.0.1"),
        ({"listen": "10.0.0.1:1"}, "10.0.0.1"),
        ({"listen": "0.0.0.0:1", "advertise": "encoder:1"}, "encoder"),
        ({"listen": "0.0.0.0:1", "advertise": "encoder:1", "mooncake_host": "10.0.0.2"}, "10.0.0.2"),
        ({"listen": "0.0.0.0:1", "mooncake_host": "10.0.0.2"}, "10.0.0.2"),
    ],
)
def test_mooncake_announces_what_readers_reach(settings: dict[str, Any], host: str) -> None:
    config = serve_config(transport=("mooncake",), **settings)
    assert config.transport_options["mooncake"] == {"host": host, "protocol": "tcp"}


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1"])
def test_mooncake_cannot_announce_every_address(listen: str) -> None:
    serve_config(listen=listen)
    with pytest.raises(ValueError, match=re.escape(f"mooncake_host is '' and listen {listen}; name one address")):
        serve_config(transport=("mooncake",), listen=listen)


def test_a_message_may_be_a_little_larger_than_a_requests_media() -> None:
    config = serve_config(max_request_bytes=3000)
    assert 3000 < config.max_message_bytes < 3000 + (1 << 20)


def test_no_message_is_larger_than_protobuf_allows() -> None:
    assert serve_config(max_request_bytes=2000 << 20).max_message_bytes < 2**31


# The engine


@pytest.mark.parametrize(("slots", "steps", "num_slots"), [(0, 1, 2), (0, 2, 3), (0, 8, 9), (2, 2, 2), (64, 1, 64)])
def test_the_ring_has_a_slot_more_than_steps_unless_told(slots: int, steps: int, num_slots: int) -> None:
    assert serve_config(slots=slots, steps_in_flight=steps).num_slots == num_slots


def test_one_slot_is_no_ring() -> None:
    with pytest.raises(ValueError, match="slots is 1; allowed are 0 and 2 or more"):
        serve_config(slots=1)


def test_what_is_compiled_is_not_exact() -> None:
    assert serve_config(compile_mm_encoder=True).fidelity == "fast"
    with pytest.raises(ValueError, match="compile_mm_encoder is set and fidelity is 'exact'; compiling changes the la"):
        serve_config(compile_mm_encoder=True, fidelity="exact")


# Sizes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("4096", 4096), ("1KiB", 1024), ("1.5MiB", 3 << 19), ("2 GiB", 2 << 30), (" 1TiB ", 1 << 40)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1GB", "1gib", "-1", "1e6", "1.GiB", "1GiB2", "nan", "1_000"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write bytes, or a number with KiB, MiB, GiB or TiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 1 << 46))
def test_every_allowed_size_round_trips(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes


@given(st.integers(0, 1 << 20), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_units_multiply(count: int, unit: str) -> None:
    assert parse_bytes(f"{count}{unit}") == count * parse_bytes(f"1{unit}")


def test_an_absurd_size_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes("9" * 400)


# Objects


def test_objects() -> None:
    assert parse_object('{"max_pixels": 100352, "nested": {"a": [1]}}') == {"max_pixels": 100352, "nested": {"a": [1]}}


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "1",
        "null",
        "{",
        "",
    ],
)
def test_what_is_no_object_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a JSON object") as caught:
        parse_object(text)
    assert repr(text) in str(caught.value)


# Addresses


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert split_address("listen", text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "host",
        "host:",
        "host:-1",
        "host:65536",
        "host:http",
        "host:²",
    ],
)
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"listen is .*; expected host:port with a port of 0 to 65535") as caught:
        split_address("listen", text)
    assert repr(text) in str(caught.value)


@given(st.text("abc019.-", min_size=1), st.integers(0, 65535))
def test_addresses_round_trip(host: str, port: int) -> None:
    assert split_address("listen", f"{host}:{port}") == (host, port)
