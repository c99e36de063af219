"""Tickets on their way through JSON, and everything that is refused on arrival."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer_shim.tickets import PullTicket, from_params, to_params
from producer.wire.block import BlockIdentity, EmbeddingShape
from producer.wire.contract import DTYPE_BYTES, TICKETS_PARAM
from producer.wire.pb import encoder_cache_pb2 as pb

FIELDS: dict[str, Any] = {
    "key": "ab" * 32,
    "modality": "image",
    "num_rows": 4,
    "width": 8,
    "dtype": "bfloat16",
    "epoch": "00000000000000ff",
    "lease_id": "1" * 32,
    "address": "producer:1",
}


def hex_digits(length: int) -> st.SearchStrategy[str]:
    return st.text("0123456789abcdef", min_size=length, max_size=length)


tickets = st.builds(
    PullTicket,
    key=hex_digits(64),
    modality=st.sampled_from(["image", "video", "audio"]),
    num_rows=st.integers(1, 1 << 24),
    width=st.integers(1, 1 << 24),
    dtype=st.sampled_from(list(DTYPE_BYTES)),
    epoch=hex_digits(16),
    lease_id=hex_digits(32),
    address=st.text(),
)


@given(st.lists(tickets, max_size=4))
def test_tickets_survive_json(sent: list[PullTicket]) -> None:
    assert from_params(json.loads(json.dumps(to_params(sent)))) == sent


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {TICKETS_PARAM: []}])
def test_a_request_may_have_none(params: dict[str, Any] | None) -> None:
    assert from_params(params) == []


def test_shape_and_identity() -> None:
    ticket = PullTicket(**FIELDS)
    assert ticket.shape == EmbeddingShape(num_rows=4, width=8, dtype="bfloat16")
    assert ticket.identity(3) == BlockIdentity(key=b"\xab" * 32, epoch=255, generation=3)


def test_a_producers_message() -> None:
    """Its address is the one that it was asked at, not the one that it names."""
    message = pb.Ticket(**(FIELDS | {"modality": pb.MODALITY_IMAGE, "address": "elsewhere:1"}))
    assert PullTicket.from_message(message, "producer:1") == PullTicket(**FIELDS)


@pytest.mark.parametrize("field", ["key", "num_rows", "width", "dtype", "epoch"])
def test_a_producers_message_without_a_field(field: str) -> None:
    message = pb.Ticket(**(FIELDS | {"modality": pb.MODALITY_IMAGE}))
    message.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"the ticket's {field} is "):
        PullTicket.from_message(message, "producer:1")


BAD = [
    *((name, value) for name in ("key", "epoch") for value in ("", "AB" * 32, "xy" * 32, "ab" * 33, "ab" * 32 + "\n")),
    *((name, value) for name in ("key", "epoch", "lease_id") for value in (None, 5, ["ab"], {}, b"ab" * 32)),
    ("lease_id", "g"),
    ("lease_id", "1" * 65),
    *((name, value) for name in ("num_rows", "width") for value in (0, -1, (1 << 24) + 1, 4.0, "4", None, [4])),
    *(("dtype", value) for value in ("", "int8", "float64", None, 4, ["float32"], {})),
    *((name, value) for name in ("modality", "address") for value in (None, 1, [], {})),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_field_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        from_params({TICKETS_PARAM: [FIELDS, FIELDS | {name: value}]})
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{TICKETS_PARAM}: .*{name}"):
        from_params({TICKETS_PARAM: [{key: value for key, value in FIELDS.items() if key != name}]})


@pytest.mark.parametrize("found", ["x", 1, None, {}, [1], ["x"], [None], [[]], [FIELDS | {"more": 1}], [FIELDS] * 4097])
def test_what_is_not_a_list_of_tickets(found: Any) -> None:
    with pytest.raises(ValueError, match=TICKETS_PARAM):
        from_params({TICKETS_PARAM: found})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from(list(FIELDS)), inner),
    max_leaves=8,
)


@given(json_values, st.dictionaries(st.sampled_from(list(FIELDS)), json_values))
def test_anything_else_is_a_value_error(found: Any, changes: dict[str, Any]) -> None:
    """Whatever a client sends, the engine is not the one to stumble."""
    for params in ({TICKETS_PARAM: found}, {TICKETS_PARAM: [FIELDS | changes]}):
        try:
            tickets = from_params(params)
        except ValueError:
            continue
        assert [asdict(ticket) for ticket in tickets] == params[TICKETS_PARAM]
