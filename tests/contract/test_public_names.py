"""Names that others rely on, written down: renaming one breaks somebody's client, dashboard or command line."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from consumer_shim import metrics as shim_metrics
from consumer_shim import middleware
from producer import cli
from producer.metrics import Metrics
from producer.wire import contract
from producer.wire.pb import encoder_cache_pb2 as pb

ROOT = Path(__file__).parents[2]

MESSAGES = {
    "MediaItem": {"modality": 1, "data": 2, "decoded": 3},
    "DecodedMedia": {"shape": 1, "data": 2, "rate_hz": 3},
    "EncodeRequest": {"items": 1, "fingerprint": 2, "settings": 3, "wire_version": 4},
    "EncodeResponse": {"outcomes": 1, "fingerprint": 2},
    "EncodeStreamRequest": {"id": 1, "item": 2},
    "EncodeStreamResponse": {"id": 1, "outcome": 2},
    "ItemOutcome": {"ticket": 1, "error": 2},
    "Ticket": {
        "key": 1,
        "modality": 2,
        "num_rows": 3,
        "width": 4,
        "dtype": 5,
        "epoch": 7,
        "lease_id": 8,
        "lease_ttl": 9,
        "address": 10,
        "content_part": 11,
    },
    "AcquireRequest": {"key": 1, "epoch": 2, "lease_id": 3, "transport": 4, "wire_version": 5, "fingerprint": 6},
    "AcquireResponse": {"lease_id": 1, "lease_ttl": 2, "descriptor": 3},
    "Descriptor": {"transport": 1, "address": 2, "length": 3, "generation": 4, "peer": 5, "peer_metadata": 6},
    "ReleaseRequest": {"lease_id": 1, "lease_ids": 2},
    "ReleaseResponse": {"released": 1},
    "FetchRequest": {"lease_id": 1},
    "FetchResponse": {"data": 1},
    "GetModelInfoRequest": {},
    "GetModelInfoResponse": {
        "model": 1,
        "fingerprint": 2,
        "dtype": 3,
        "modalities": 4,
        "limits": 5,
        "transports": 6,
        "epoch": 7,
        "wire_version": 8,
        "versions": 9,
        "address": 10,
        "shared_memory": 11,
    },
    "ModalityInfo": {"modality": 1, "width": 2},
    "Limits": {
        "max_items_per_request": 1,
        "max_item_bytes": 2,
        "max_item_rows": 3,
        "max_queue_items": 4,
        "pool_bytes": 5,
        "max_request_bytes": 6,
        "max_queue_bytes": 7,
        "max_streams": 8,
        "item_timeout": 9,
        "max_client_items": 10,
    },
}
CALLS = {  # request, response, whether each streams
    "Encode": ("EncodeRequest", "EncodeResponse", False, False),
    "EncodeStream": ("EncodeStreamRequest", "EncodeStreamResponse", True, True),
    "Acquire": ("AcquireRequest", "AcquireResponse", False, False),
    "Release": ("ReleaseRequest", "ReleaseResponse", False, False),
    "Fetch": ("FetchRequest", "FetchResponse", False, True),
    "GetModelInfo": ("GetModelInfoRequest", "GetModelInfoResponse", False, False),
}
REASONS = {
    "MALFORMED_REQUEST",
    "UNSUPPORTED_MODALITY",
    "MEDIA_EMPTY",
    "MEDIA_TOO_LARGE",
    "MEDIA_UNREADABLE",
    "MEDIA_REFUSED",
    "FINGERPRINT_MISMATCH",
    "SETTINGS_MISMATCH",
    "WIRE_VERSION_MISMATCH",
    "EPOCH_MISMATCH",
    "UNKNOWN_TRANSPORT",
    "TRANSPORT_DOWN",
    "NOT_IN_POOL",
    "LEASE_ENDED",
    "QUEUE_FULL",
    "POOL_FULL",
    "TOO_MANY_LEASES",
    "NON_FINITE_OUTPUT",
    "ENCODE_FAILED",
    "WORKER_DIED",
    "SHUTTING_DOWN",
    "TOO_MANY_STREAMS",
    "DEADLINE_UNMEETABLE",
    "DEADLINE_EXCEEDED",
    "DEVICE_LOST",
    "REQUEST_TOO_LARGE",
    "CLIENT_LIMIT",
    "UNAUTHENTICATED",
    "STREAM_IDLE",
    "FETCH_TOO_SLOW",
    "MEDIA_TOO_SLOW",
    "MEDIA_CRASHES_DECODER",
}
METRICS = {
    "ec_producer_requests": "counter",
    "ec_producer_items": "counter",
    "ec_producer_items_shared": "counter",
    "ec_producer_queue_items": "gauge",
    "ec_producer_queue_bytes": "gauge",
    "ec_producer_queue_seconds": "histogram",
    "ec_producer_stage_seconds": "histogram",
    "ec_producer_step_items": "histogram",
    "ec_producer_preprocess_workers": "gauge",
    "ec_producer_preprocess_deaths": "counter",
    "ec_producer_stalled_seconds": "gauge",
    "ec_producer_non_finite_outputs": "counter",
    "ec_producer_graph_hits": "counter",
    "ec_producer_graph_misses": "counter",
    "ec_producer_graph_replays": "counter",
    "ec_producer_graph_rows": "counter",
    "ec_producer_device_bytes": "gauge",
    "ec_producer_slot_wait_seconds": "histogram",
    "ec_producer_pool_bytes": "gauge",
    "ec_producer_pool_used_bytes": "gauge",
    "ec_producer_pool_entries": "gauge",
    "ec_producer_pool_pinned_entries": "gauge",
    "ec_producer_pool_leases": "gauge",
    "ec_producer_pool_lookups": "counter",
    "ec_producer_pool_evictions": "counter",
    "ec_producer_leases_granted": "counter",
    "ec_producer_leases_expired": "counter",
    "ec_producer_pulls": "counter",
    "ec_producer_pull_bytes": "counter",
    "ec_producer_pull_seconds": "histogram",
    "ec_producer_pull_failures": "counter",
    "ec_producer_part_up": "gauge",
    "ec_producer_model": "info",
    "ec_producer_build": "info",
}
"""Without the `_total`, `_info` and so on that a type adds when it is scraped."""
FLAGS = {
    "--publish-files",
    "--publish-files-bytes",
    "--publish-files-age-s",
    "--listen",
    "--tls-cert",
    "--tls-key",
    "--tls-client-ca",
    "--token-file",
    "--max-client-items",
    "--metrics-listen",
    "--advertise",
    "--transport",
    "--nixl-devices",
    "--mooncake-host",
    "--mooncake-protocol",
    "--dtype",
    "--mm-encoder-attn-backend",
    "--fidelity",
    "--eager",
    "--require-graphs",
    "--graph-rows",
    "--graph-items",
    "--compile-mm-encoder",
    "--steps-in-flight",
    "--slots",
    "--slot-bytes",
    "--device-memory-bytes",
    "--trust-remote-code",
    "--revision",
    "--mm-processor-kwargs",
    "--media-io-kwargs",
    "--pool-bytes",
    "--lease-s",
    "--max-leases",
    "--max-queue-items",
    "--max-queue-bytes",
    "--item-timeout-s",
    "--max-streams",
    "--stream-idle-s",
    "--max-request-bytes",
    "--stall-s",
    "--stall-exit-s",
    "--preprocess-timeout-s",
    "--preprocess-memory-bytes",
    "--max-items-per-request",
    "--max-item-bytes",
    "--max-item-pixels",
    "--max-video-pixels",
    "--max-video-frames",
    "--max-audio-s",
    "--max-item-rows",
    "--max-batch-rows",
    "--max-batch-items",
    "--preprocess-workers",
    "--drain-s",
    "--log-format",
    "--log-level",
    "--otlp-traces-endpoint",
    "--trace-sample-ratio",
}


# The API


def test_messages_and_fields() -> None:
    kinds = pb.DESCRIPTOR.message_types_by_name
    assert {name: {field.name: field.number for field in kind.fields} for name, kind in kinds.items()} == MESSAGES


def test_numbers_of_fields_that_went_stay_taken() -> None:
    """A client that still sends or reads one must not be misunderstood."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    taken = {kind.name: [(one.start, one.end) for one in kind.reserved_range] for kind in file.message_type}
    assert {name: ranges for name, ranges in taken.items() if ranges} == {"Ticket": [(6, 7)]}


def test_an_item_is_a_file_or_what_was_decoded_of_one() -> None:
    """Setting one clears the other, in every language's stubs."""
    kinds = pb.DESCRIPTOR.message_types_by_name.values()
    oneofs = {f"{kind.name}.{one.name}": [field.name for field in one.fields] for kind in kinds for one in kind.oneofs}
    assert oneofs == {"MediaItem.content": ["data", "decoded"], "ItemOutcome.outcome": ["ticket", "error"]}


def test_modalities() -> None:
    numbers = {"MODALITY_UNSPECIFIED": 0, "MODALITY_IMAGE": 1, "MODALITY_VIDEO": 2, "MODALITY_AUDIO": 3}
    assert dict(pb.Modality.items()) == numbers


def test_service_and_calls() -> None:
    assert pb.DESCRIPTOR.package == "ec_producer.v1"
    service = pb.DESCRIPTOR.services_by_name["EncoderCache"]
    assert service.full_name == contract.SERVICE_NAME == "ec_producer.v1.EncoderCache"
    calls = {
        call.name: (call.input_type.name, call.output_type.name, call.client_streaming, call.server_streaming)
        for call in service.methods
    }
    assert calls == CALLS


def test_reasons() -> None:
    assert {reason.value for reason in contract.Reason} == REASONS
    assert all(reason.name == reason.value for reason in contract.Reason)
    assert contract.ERROR_DOMAIN == "ec-producer"


def test_what_else_both_sides_share() -> None:
    assert contract.GRPC_TRANSPORT == "grpc"
    assert contract.TICKETS_PARAM == "ec_producer_tickets"
    assert contract.DTYPE_BYTES == {"bfloat16": 2, "float16": 2, "float32": 4}
    assert contract.FETCH_CHUNK_BYTES <= 1 << 20  # what the .proto promises


# What operators see


def test_metrics() -> None:
    found = {family.name: family.type for family in Metrics().registry.collect()}
    assert {name: kind for name, kind in found.items() if not name.startswith(("process_", "python_"))} == METRICS


def test_shim_metrics() -> None:
    found = {one.full_name: (one.kind, tuple(one.labels)) for one in shim_metrics.DECLARATIONS}
    assert found == {
        "ec_producer_shim_pulls": ("counter", ("outcome", "transport")),
        "ec_producer_shim_pull_seconds": ("histogram", ("transport",)),
        "ec_producer_shim_pull_bytes": ("counter", ("transport",)),
        "ec_producer_shim_encodes": ("counter", ("code",)),
        "ec_producer_shim_encode_seconds": ("histogram", ()),
        "ec_producer_shim_reencodes": ("counter", ()),
    }


def test_labels() -> None:
    """Other names are a `ValueError`. None of them takes a content key, or anything else without a bound."""
    metrics = Metrics()
    metrics.items.labels(code="OK")
    metrics.items_shared.labels(source="pool")
    metrics.stage_seconds.labels(stage="encode")
    metrics.graph_misses.labels(reason="no_device")
    metrics.graph_replays.labels(budget="64")
    metrics.graph_rows.labels(budget="64", kind="padding")
    metrics.device_bytes.labels(part="weights")
    metrics.pulls.labels(transport="grpc")
    metrics.pull_bytes.labels(transport="grpc")
    metrics.pull_seconds.labels(transport="grpc")
    metrics.pull_failures.labels(transport="grpc")
    metrics.pool_lookups.labels(result="hit")
    metrics.requests.labels(method="Encode", code="OK")
    metrics.part_up.labels(part="device")


@pytest.mark.parametrize(("command", "flags"), [("serve", FLAGS), ("doctor", FLAGS | {"--json"})])
def test_flags(command: str, flags: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert set(re.findall(r"^ +(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) == flags


# What a vLLM's command line names


def test_the_connector() -> None:
    """Read, not imported: that takes vLLM, and seconds."""
    module = ast.parse((ROOT / "consumer_shim" / "connector.py").read_text())
    classes = {
        node.name: [ast.unparse(base) for base in node.bases] for node in module.body if isinstance(node, ast.ClassDef)
    }
    assert classes["ECProducerConnector"] == ["ECConnectorBase"]


def test_the_middleware() -> None:
    assert inspect.isclass(middleware.EncodeMiddleware)
    assert list(inspect.signature(middleware.EncodeMiddleware).parameters) == ["app"]
