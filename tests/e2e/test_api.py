"""What a gRPC client and a person at a shell see of a running producer."""

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from safetensors.torch import load_file

from consumer_shim.client import Producer
from producer.wire.contract import SERVICE_NAME
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.e2e.conftest import Servers
from tests.kit.photos import photos
from tests.kit.reference import reference_embeddings

pytestmark = pytest.mark.e2e


def test_health_is_told_by_service(servers: Servers) -> None:
    with grpc.insecure_channel(servers.producer.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", SERVICE_NAME):
            assert check(health_pb2.HealthCheckRequest(service=name), timeout=10).status == 1
        with pytest.raises(grpc.RpcError) as unknown:
            check(health_pb2.HealthCheckRequest(service="nothing"), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_describes_the_service(servers: Servers) -> None:
    with grpc.insecure_channel(servers.producer.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE_NAME in database.get_services()
        file = database.FindFileContainingSymbol(SERVICE_NAME)
        assert [method.name for method in file.service[0].method] == [
            method.name for method in pb.DESCRIPTOR.services_by_name["EncoderCache"].methods
        ]


def test_model_info(servers: Servers, model: Path) -> None:
    client = Producer(servers.producer.address)
    info = client.info(10)
    client.close()
    assert info.model == str(model)
    assert len(info.fingerprint) == 64
    widths = {one.modality: one.width for one in info.modalities}
    assert widths == {pb.MODALITY_IMAGE: 128, pb.MODALITY_VIDEO: 128}
    assert info.dtype == "bfloat16"
    assert list(info.transports) == ["shm", "nixl", "mooncake", "grpc"]
    assert info.address == servers.producer.address
    assert info.versions.keys() >= {"ec-producer", "vllm", "torch"}
    assert info.limits.max_items_per_request == 64


def test_metrics_say_that_steps_ran_eagerly(servers: Servers) -> None:
    """The warm-up is a step, so there is one at least."""
    assert servers.producer.metric("ec_producer_graph_misses_total", reason="no_device") > 0
    assert servers.producer.metric("ec_producer_graph_hits_total") == 0
    assert servers.producer.metric("ec_producer_pool_bytes") == 1 << 30


def test_the_command_encodes_files(servers: Servers, model: Path, tmp_path: Path) -> None:
    """Good files are written although one is bad; the file's tensor is vLLM's own embedding."""
    photo = photos()["rocket.jpg"]
    (tmp_path / "rocket.jpg").write_bytes(photo.data)
    (tmp_path / "notes.txt").write_text("no picture")
    command = [sys.executable, "-m", "producer.cli", "encode", "rocket.jpg", "notes.txt", "absent.png"]
    command += ["--address", servers.producer.address, "--out", "embeddings"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "rocket.jpg" in done.stdout
    assert "notes.txt: the image cannot be decoded" in done.stderr
    assert "absent.png: [Errno 2]" in done.stderr
    (written,) = (tmp_path / "embeddings").iterdir()
    assert written.stem in done.stdout
    (expected,) = reference_embeddings(model, [photo.data])
    assert load_file(written)["embedding"].equal(expected)
