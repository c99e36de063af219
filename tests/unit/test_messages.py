"""Messages: what a client is told of an embedding, and of an error."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from producer import errors
from producer.core import EmbeddingInfo, Lease, NumberArray
from producer.errors import InvalidItemError, OverloadedError, ServiceError
from producer.messages import duration, error_status, status_code, ticket
from producer.wire.block import EmbeddingShape
from producer.wire.contract import Reason
from producer.wire.pb import encoder_cache_pb2 as pb

KINDS = ServiceError.__subclasses__()


def lease(**metadata: NumberArray) -> Lease:
    return Lease(
        lease_id="ab" * 16,
        key="cd" * 32,
        transport="",
        info=EmbeddingInfo(
            modality="image", shape=EmbeddingShape(num_rows=20, width=64, dtype="bfloat16"), metadata=metadata
        ),
        offset=4096,
        num_bytes=2752,
        generation=9,
        expires_at_s=1e9,
    )


def ticket_of(**metadata: NumberArray) -> pb.Ticket:
    return ticket(lease(**metadata), epoch="0123456789abcdef", lease_s=60.5, address="host:1")


def details_of(status: status_pb2.Status) -> dict[str, object]:
    found: dict[str, object] = {}
    for detail in status.details:
        kind = detail.TypeName().rpartition(".")[2]
        found[kind] = message = getattr(error_details_pb2, kind)()
        assert detail.Unpack(message)
    return found


# Tickets


def test_a_ticket_has_all_of_a_lease_that_a_consumer_needs() -> None:
    found = ticket_of(image_grid_thw=NumberArray(shape=(3,), values=(1, 8, 10)))
    assert found == pb.Ticket(
        key="cd" * 32,
        modality=pb.MODALITY_IMAGE,
        num_rows=20,
        width=64,
        dtype="bfloat16",
        metadata={"image_grid_thw": pb.NumberArray(shape=[3], ints=[1, 8, 10])},
        epoch="0123456789abcdef",
        lease_id="ab" * 16,
        lease_ttl=duration(60.5),
        address="host:1",
    )


@pytest.mark.parametrize(
    ("values", "ints", "floats"),
    [((1, 2), [1, 2], []), ((1.0, 2.0), [], [1.0, 2.0]), ((1, 2.5), [], [1.0, 2.5]), ((), [], [])],
)
def test_numbers_are_integers_where_all_are(values: tuple[float, ...], ints: list[int], floats: list[float]) -> None:
    numbers = ticket_of(field=NumberArray(shape=(len(values),), values=values)).metadata["field"]
    assert (list(numbers.ints), list(numbers.floats)) == (ints, floats)


def test_a_scalar_has_no_dimension() -> None:
    numbers = ticket_of(field=NumberArray(shape=(), values=(7,))).metadata["field"]
    assert (list(numbers.shape), list(numbers.ints)) == ([], [7])


# Durations


@given(st.integers(1, 3600_000))
def test_durations_are_exact_to_the_millisecond(millis: int) -> None:
    assert duration(millis / 1000).ToMilliseconds() == millis


# Errors


def test_every_error_has_a_status() -> None:
    assert set(errors.STATUS_CODES) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_says_code_reason_and_sentence(kind: type[ServiceError]) -> None:
    status = error_status(kind(Reason.MEDIA_EMPTY, "a sentence"))
    assert status.code == errors.STATUS_CODES[kind].value[0]
    assert status.message == "a sentence"
    info = details_of(status)["ErrorInfo"]
    assert (info.reason, info.domain, dict(info.metadata)) == ("MEDIA_EMPTY", "ec-producer", {})


def test_an_items_error_says_which_item() -> None:
    status = error_status(InvalidItemError(Reason.MEDIA_EMPTY, "a sentence"), 3)
    assert dict(details_of(status)["ErrorInfo"].metadata) == {"item_index": "3"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_only_overload_says_when_to_come_back(kind: type[ServiceError]) -> None:
    details = details_of(error_status(kind(Reason.QUEUE_FULL, "a sentence")))
    assert ("RetryInfo" in details) == (kind is OverloadedError)
    if kind is OverloadedError:
        assert details["RetryInfo"].retry_delay.ToMilliseconds() > 0


def test_a_subclass_has_its_parents_status() -> None:
    class VeryFullError(OverloadedError):
        """A kind that the table does not list."""

    assert status_code(VeryFullError(Reason.POOL_FULL, "")) is grpc.StatusCode.RESOURCE_EXHAUSTED
