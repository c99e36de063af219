"""Messages: what a client is told of an embedding, and of an error."""

import json

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from producer import errors
from producer.config import ServeConfig
from producer.core import ContentPart, DecodedForm, EmbeddingInfo, Lease, MediaItem, ModelInfo
from producer.errors import InvalidItemError, InvalidRequestError, OverloadedError, ServiceError
from producer.messages import duration, error_status, media_item, model_info, status_code, ticket
from producer.wire.block import EmbeddingShape
from producer.wire.contract import Reason
from producer.wire.pb import encoder_cache_pb2 as pb

KINDS = ServiceError.__subclasses__()


PART = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 10]}}


def lease(part: ContentPart) -> Lease:
    return Lease(
        lease_id="ab" * 16,
        key="cd" * 32,
        transport="",
        info=EmbeddingInfo(
            modality="image", shape=EmbeddingShape(num_rows=20, width=64, dtype="bfloat16"), content_part=part
        ),
        offset=4096,
        num_bytes=2752,
        generation=9,
        expires_at_s=1e9,
    )


def ticket_of(part: ContentPart) -> pb.Ticket:
    return ticket(lease(part), epoch="0123456789abcdef", lease_s=60.5, address="host:1")


def details_of(status: status_pb2.Status) -> dict[str, object]:
    found: dict[str, object] = {}
    for detail in status.details:
        kind = detail.TypeName().rpartition(".")[2]
        found[kind] = message = getattr(error_details_pb2, kind)()
        assert detail.Unpack(message)
    return found


# Tickets


def test_a_ticket_has_all_of_a_lease_that_a_consumer_needs() -> None:
    found = ticket_of(PART)
    part = json.loads(found.content_part)
    assert part == {**PART, "uuid": "cd" * 32}
    found.ClearField("content_part")
    assert found == pb.Ticket(
        key="cd" * 32,
        modality=pb.MODALITY_IMAGE,
        num_rows=20,
        width=64,
        dtype="bfloat16",
        epoch="0123456789abcdef",
        lease_id="ab" * 16,
        lease_ttl=duration(60.5),
        address="host:1",
    )


def test_a_part_goes_by_its_key_whatever_it_says_itself() -> None:
    part = {**PART, "uuid": "another"}
    assert json.loads(ticket_of(part).content_part)["uuid"] == "cd" * 32
    assert part["uuid"] == "another"


# Items


def test_a_file_is_taken_as_it_is() -> None:
    item = media_item(pb.MediaItem(modality=pb.MODALITY_VIDEO, data=b"file"))
    assert item == MediaItem(modality="video", data=b"file", decoded=None)


def test_what_was_decoded_has_its_form() -> None:
    decoded = pb.DecodedMedia(shape=[2, 1, 1, 3], data=b"pixels", rate_hz=2.5)
    item = media_item(pb.MediaItem(modality=pb.MODALITY_VIDEO, decoded=decoded))
    form = DecodedForm(shape=(2, 1, 1, 3), rate_hz=2.5)
    assert item == MediaItem(modality="video", data=b"pixels", decoded=form)
    assert hash(item.decoded) == hash(form)


@pytest.mark.parametrize(
    ("sent", "form"),
    [
        (pb.MediaItem(), None),
        (pb.MediaItem(data=b""), None),
        (pb.MediaItem(decoded=pb.DecodedMedia()), DecodedForm(shape=(), rate_hz=0.0)),
    ],
    ids=["nothing", "an empty file", "nothing decoded"],
)
def test_what_is_empty_stays_so(sent: pb.MediaItem, form: DecodedForm | None) -> None:
    assert media_item(sent) == MediaItem(modality="number 0", data=b"", decoded=form)


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


@pytest.mark.parametrize(
    ("error", "index", "field"),
    [
        (InvalidItemError(Reason.MEDIA_EMPTY, "a sentence"), 3, "items[3]"),
        (InvalidRequestError(Reason.MALFORMED_REQUEST, "a sentence"), None, "items"),
        (InvalidRequestError(Reason.UNKNOWN_TRANSPORT, "a sentence", field="transport"), None, "transport"),
    ],
)
def test_a_bad_argument_is_named(error: ServiceError, index: int | None, field: str) -> None:
    (violation,) = details_of(error_status(error, index))["BadRequest"].field_violations
    assert (violation.field, violation.description) == (field, "a sentence")
    assert "BadRequest" not in details_of(error_status(OverloadedError(Reason.QUEUE_FULL, "a sentence")))


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


def test_what_is_served_is_said_with_its_width() -> None:
    widths = {"image": 24, "video": 24, "audio": 8}
    model = ModelInfo(
        model="tiny", fingerprint="0" * 64, dtype="float32", widths=widths, versions={}, attention_backend="TORCH_SDPA"
    )
    info = model_info(ServeConfig(model="tiny"), model, epoch=1, address="h:1", shared_memory="")
    served = [(one.modality, one.width) for one in info.modalities]
    assert served == [(pb.MODALITY_IMAGE, 24), (pb.MODALITY_VIDEO, 24), (pb.MODALITY_AUDIO, 8)]
