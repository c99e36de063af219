"""Between our records and the generated messages: pure translation."""

import json
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from producer import call_notes
from producer.config import ServeConfig
from producer.core import DecodedForm, Lease, MediaItem, ModelInfo
from producer.errors import STATUS_CODES, InvalidRequestError, OverloadedError, ServiceError
from producer.wire.contract import ERROR_DOMAIN, WIRE_VERSION
from producer.wire.modality import modality_name, modality_number
from producer.wire.pb import encoder_cache_pb2 as pb


def media_item(item: pb.MediaItem) -> MediaItem:
    """What a client sent."""
    modality = modality_name(item.modality)
    if not item.HasField("decoded"):
        return MediaItem(modality=modality, data=item.data)
    rate_hz = 0.0 if modality == "image" else item.decoded.rate_hz
    form = DecodedForm(shape=tuple(item.decoded.shape), rate_hz=rate_hz)
    return MediaItem(modality=modality, data=item.decoded.data, decoded=form)


def ticket(lease: Lease, *, epoch: str, lease_s: float, address: str) -> pb.Ticket:
    """The ticket for an embedding that `lease` keeps."""
    shape = lease.info.shape
    return pb.Ticket(
        key=lease.key,
        modality=modality_number(lease.info.modality),
        num_rows=shape.num_rows,
        width=shape.width,
        dtype=shape.dtype,
        content_part=json.dumps({**lease.info.content_part, "uuid": lease.key}),
        epoch=epoch,
        lease_id=lease.lease_id,
        lease_ttl=duration(lease_s),
        address=address,
    )


def duration(seconds: float) -> Duration:
    """Seconds as a protobuf Duration, to the millisecond."""
    millis = round(seconds * 1000)
    return Duration(seconds=millis // 1000, nanos=millis % 1000 * 1_000_000)


def error_status(error: ServiceError, item_index: int | None = None) -> status_pb2.Status:
    """The `google.rpc.Status` of an error; `item_index` is the item's place in its request."""
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=ERROR_DOMAIN)
    field = error.field if isinstance(error, InvalidRequestError) else "items"
    if item_index is not None:
        info.metadata["item_index"] = str(item_index)
        field = f"items[{item_index}]"
    details: list[Message] = [info]
    if isinstance(error, OverloadedError):
        details.append(error_details_pb2.RetryInfo(retry_delay=duration(error.retry_s)))
    if status_code(error) is grpc.StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    return status_pb2.Status(code=status_code(error).value[0], message=str(error), details=map(_packed, details))


def status_code(error: ServiceError) -> grpc.StatusCode:
    """The gRPC status of an error."""
    return next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> None:
    """Ends a call with the error's status and its details; raises. The trailing metadata that was set stays."""
    call_notes.add(reason=error.reason.value)
    details = ("grpc-status-details-bin", error_status(error).SerializeToString())
    await context.abort(status_code(error), str(error), (*(context.trailing_metadata() or ()), details))


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def model_info(
    config: ServeConfig, model: ModelInfo, *, epoch: int, address: str, shared_memory: str
) -> pb.GetModelInfoResponse:
    """What a client is told of `model`, of this start of the producer, and of where it is."""
    return pb.GetModelInfoResponse(
        model=model.model,
        fingerprint=model.fingerprint,
        dtype=model.dtype,
        modalities=[
            pb.ModalityInfo(modality=modality_number(name), width=width) for name, width in model.widths.items()
        ],
        limits=pb.Limits(
            max_items_per_request=config.max_items_per_request,
            max_item_bytes=config.max_item_bytes,
            max_item_rows=config.max_item_rows,
            max_queue_items=config.max_queue_items,
            pool_bytes=config.pool_bytes,
            max_request_bytes=config.max_request_bytes,
            max_queue_bytes=config.max_queue_bytes,
            max_streams=config.max_streams,
            item_timeout=duration(config.item_timeout_s),
            max_client_items=config.max_client_items,
        ),
        transports=config.transports,
        epoch=f"{epoch:016x}",
        wire_version=WIRE_VERSION,
        versions=model.versions,
        address=address,
        shared_memory=shared_memory,
    )
