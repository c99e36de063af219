"""Bytes as they travel, written down: whoever changes them by accident fails here, and must raise `WIRE_VERSION` if
the change is meant."""

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import status_pb2

from producer.wire.block import BlockIdentity, EmbeddingShape, read_block, write_block
from producer.wire.content_key import content_key
from producer.wire.contract import WIRE_VERSION
from producer.wire.pb import encoder_cache_pb2 as pb

BLOCK = bytes.fromhex(
    # magic, wire version, header bytes, epoch, generation
    "454350424c4f434b 01000000 80000000 efcdab8967452301 2a00000000000000"
    # key
    "000102030405060708090a0b0c0d0e0f 101112131415161718191a1b1c1d1e1f"
    # rows, width, dtype, bytes
    "02000000 03000000 62666c6f617431360000000000000000 0c00000000000000"
    # checksum
    "ac255a5e 00000000000000000000000000000000000000000000000000000000"
    # the rows
    "a0a1a2a3a4a5a6a7a8a9aaab"
    # generation
    "2a00000000000000" + 56 * "00"
)
IDENTITY = BlockIdentity(key=bytes(range(32)), epoch=0x0123456789ABCDEF, generation=42)
SHAPE = EmbeddingShape(num_rows=2, width=3, dtype="bfloat16")
ROWS = bytes(range(0xA0, 0xAC))

TICKET = pb.Ticket(
    key="k",
    modality=pb.MODALITY_VIDEO,
    num_rows=20,
    width=64,
    dtype="bfloat16",
    epoch="e",
    lease_id="l",
    lease_ttl=Duration(seconds=60, nanos=500_000_000),
    address="h:1",
    content_part="{}",
)
DESCRIPTOR = pb.Descriptor(
    transport="grpc", address=1 << 40, length=300, generation=42, peer="p", peer_metadata=b"\x00\xff"
)
LIMITS = pb.Limits(
    max_items_per_request=64,
    max_item_bytes=1 << 25,
    max_item_rows=16384,
    max_queue_items=256,
    pool_bytes=1 << 30,
    max_request_bytes=1 << 28,
    max_queue_bytes=1 << 30,
    max_streams=64,
    item_timeout=Duration(seconds=120),
    max_client_items=32,
)
INFO = pb.GetModelInfoResponse(
    model="m",
    fingerprint="f",
    dtype="bfloat16",
    modalities=[pb.ModalityInfo(modality=pb.MODALITY_IMAGE, width=128)],
    limits=LIMITS,
    transports=["nixl", "grpc"],
    epoch="e",
    wire_version=1,
    versions={"torch": "2"},
    address="h:1",
    shared_memory="s",
)
MESSAGES: list[tuple[Message, str]] = [
    (pb.MediaItem(modality=pb.MODALITY_IMAGE, data=b"photo"), "0801120570686f746f"),
    (
        pb.MediaItem(modality=pb.MODALITY_AUDIO, decoded=pb.DecodedMedia(shape=[1], data=b"wave", rate_hz=16000)),
        "08031a120a010112047761766519000000000040cf40",
    ),
    (pb.DecodedMedia(shape=[8, 300, 1, 3], data=b"rgb", rate_hz=0.5), "0a0508ac020103120372676219000000000000e03f"),
    (
        pb.EncodeRequest(
            items=[pb.MediaItem(data=b"a"), pb.MediaItem(data=b"b")],
            fingerprint="f",
            settings={"m": "{}"},
            wire_version=1,
        ),
        "0a031201610a031201621201661a070a016d12027b7d2001",
    ),
    (pb.EncodeStreamRequest(id=7, item=pb.MediaItem(data=b"a")), "08071203120161"),
    (pb.EncodeStreamResponse(id=7, outcome=pb.ItemOutcome(ticket=pb.Ticket(key="k"))), "080712050a030a016b"),
    (
        pb.EncodeResponse(outcomes=[pb.ItemOutcome(ticket=pb.Ticket(key="k"))], fingerprint="f"),
        "0a050a030a016b120166",
    ),
    (
        pb.ItemOutcome(ticket=TICKET),
        "0a2c0a016b1002181420402a0862666c6f617431363a016542016c4a08083c1080cab5ee015203683a315a027b7d",
    ),
    (pb.ItemOutcome(error=status_pb2.Status(code=3, message="m")), "1205080312016d"),
    (
        TICKET,
        "0a016b1002181420402a0862666c6f617431363a016542016c4a08083c1080cab5ee015203683a315a027b7d",
    ),
    (
        pb.AcquireRequest(key="k", epoch="e", lease_id="l", transport="nixl", wire_version=1, fingerprint="f"),
        "0a016b1201651a016c22046e69786c2801320166",
    ),
    (
        pb.AcquireResponse(lease_id="l", lease_ttl=Duration(seconds=60), descriptor=DESCRIPTOR),
        "0a016c1202083c1a190a04677270631080808080802018ac02202a2a0170320200ff",
    ),
    (DESCRIPTOR, "0a04677270631080808080802018ac02202a2a0170320200ff"),
    (pb.ReleaseRequest(lease_id="l"), "0a016c"),
    (pb.ReleaseRequest(lease_id="l", lease_ids=["m", "n"]), "0a016c12016d12016e"),
    (pb.ReleaseResponse(released=True), "0801"),
    (pb.FetchRequest(lease_id="l"), "0a016c"),
    (pb.FetchResponse(data=b"bytes"), "0a056279746573"),
    (pb.GetModelInfoRequest(), ""),
    (
        INFO,
        "0a016d1201661a0862666c6f61743136220508011080012a28084010808080101880800120800228808080800430808080800138808080800440404a020878502032046e69786c3204677270633a016540014a0a0a05746f7263681201325203683a315a0173",
    ),
    (pb.ModalityInfo(modality=pb.MODALITY_AUDIO, width=128), "0803108001"),
    (LIMITS, "084010808080101880800120800228808080800430808080800138808080800440404a0208785020"),
]


def test_a_block_is_written_so() -> None:
    block = bytearray(SHAPE.block_bytes)
    write_block(memoryview(block), IDENTITY, SHAPE, memoryview(ROWS))
    assert block.hex() == BLOCK.hex()


def test_such_a_block_is_read() -> None:
    assert bytes(read_block(memoryview(BLOCK), IDENTITY, SHAPE)) == ROWS


def test_the_wire_version_is_the_blocks() -> None:
    assert int.from_bytes(BLOCK[8:12], "little") == WIRE_VERSION


def test_a_content_key_is_made_so() -> None:
    key = content_key("0123456789abcdef" * 4, "image", b"photo")
    assert key == "feeb547ea4487d3ae8d02fe12a50723f81291a94e29c5a52e67fcd041ca1df34"


def test_a_content_key_of_what_was_decoded_is_made_so() -> None:
    key = content_key("0123456789abcdef" * 4, "audio", b"waves", ((2, 10), 0.1))
    assert key == "be7a88f9f77fb527919a39b4cf90d92bda4d42a4b605cd924f62ca30c49e871d"


@pytest.mark.parametrize(
    ("message", "hexdigits"), MESSAGES, ids=lambda value: value.DESCRIPTOR.name if isinstance(value, Message) else ""
)
def test_a_message_travels_so(message: Message, hexdigits: str) -> None:
    assert message.SerializeToString(deterministic=True).hex() == hexdigits
    assert type(message).FromString(bytes.fromhex(hexdigits)) == message


def test_every_message_and_every_field_is_written_down() -> None:
    fields = {field.full_name for kind in pb.DESCRIPTOR.message_types_by_name.values() for field in kind.fields}
    for message, _ in MESSAGES:
        fields -= {field.full_name for field, _ in message.ListFields()}
    assert {name for name in fields if not name.endswith("Entry")} == set()
    kinds = {message.DESCRIPTOR.name for message, _ in MESSAGES}
    assert kinds == set(pb.DESCRIPTOR.message_types_by_name)
