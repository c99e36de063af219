"""Names and numbers that both sides of the wire share. Changing what one of them means needs a new WIRE_VERSION."""

import enum
from typing import Final

WIRE_VERSION: Final = 1
"""Version of the block format and of the meaning of a ticket. Part of every content key."""

SERVICE_NAME: Final = "ec_producer.v1.EncoderCache"
ERROR_DOMAIN: Final = "ec-producer"
"""`google.rpc.ErrorInfo.domain` of every error."""

MAX_MORE_LEASES: Final = 1024
"""Most `lease_ids` of one Release."""

FETCH_CHUNK_BYTES: Final = 1 << 20
"""Most bytes in one message of `Fetch`."""

SHM_TRANSPORT: Final = "shm"
"""One copy through shared memory, for a reader on the producer's own host."""

GRPC_TRANSPORT: Final = "grpc"
"""The transport that is always there: block bytes over `Fetch`."""

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element, by the element types that an embedding may have."""

TICKETS_PARAM: Final = "ec_producer_tickets"
"""Field of a request's `ec_transfer_params` that carries its tickets."""


class Reason(str, enum.Enum):
    """`google.rpc.ErrorInfo.reason`: stable, for programs. The message beside it is for people."""

    MALFORMED_REQUEST = "MALFORMED_REQUEST"
    UNSUPPORTED_MODALITY = "UNSUPPORTED_MODALITY"
    MEDIA_EMPTY = "MEDIA_EMPTY"
    MEDIA_TOO_LARGE = "MEDIA_TOO_LARGE"
    MEDIA_UNREADABLE = "MEDIA_UNREADABLE"
    MEDIA_REFUSED = "MEDIA_REFUSED"
    MEDIA_TOO_SLOW = "MEDIA_TOO_SLOW"
    MEDIA_CRASHES_DECODER = "MEDIA_CRASHES_DECODER"
    FINGERPRINT_MISMATCH = "FINGERPRINT_MISMATCH"
    SETTINGS_MISMATCH = "SETTINGS_MISMATCH"
    WIRE_VERSION_MISMATCH = "WIRE_VERSION_MISMATCH"
    EPOCH_MISMATCH = "EPOCH_MISMATCH"
    UNKNOWN_TRANSPORT = "UNKNOWN_TRANSPORT"
    TRANSPORT_DOWN = "TRANSPORT_DOWN"
    NOT_IN_POOL = "NOT_IN_POOL"
    LEASE_ENDED = "LEASE_ENDED"
    QUEUE_FULL = "QUEUE_FULL"
    TOO_MANY_STREAMS = "TOO_MANY_STREAMS"
    DEADLINE_UNMEETABLE = "DEADLINE_UNMEETABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    STREAM_IDLE = "STREAM_IDLE"
    FETCH_TOO_SLOW = "FETCH_TOO_SLOW"
    DEVICE_LOST = "DEVICE_LOST"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    CLIENT_LIMIT = "CLIENT_LIMIT"
    POOL_FULL = "POOL_FULL"
    TOO_MANY_LEASES = "TOO_MANY_LEASES"
    NON_FINITE_OUTPUT = "NON_FINITE_OUTPUT"
    ENCODE_FAILED = "ENCODE_FAILED"
    WORKER_DIED = "WORKER_DIED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    UNAUTHENTICATED = "UNAUTHENTICATED"
