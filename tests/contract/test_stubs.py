"""The generated stubs load and round-trip with every protobuf that vLLM allows, on both of its implementations."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.wheel import ROOT

INSTALLED = importlib.metadata.version("protobuf")
VERSIONS = ["5.29.6", "6.33.5", INSTALLED]
"""vLLM's minimum, the first that it allows after those it excludes, and the newest tried."""

ROUND_TRIP = """
import google.protobuf
from google.protobuf.internal import api_implementation
from google.rpc import status_pb2
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb import encoder_cache_pb2_grpc

ticket = pb.Ticket(key="ab", modality=pb.MODALITY_IMAGE, num_rows=20, width=64, dtype="bfloat16", content_part="{}")
ticket.lease_ttl.FromMilliseconds(1500)
failed = pb.ItemOutcome(error=status_pb2.Status(code=3, message="not an image"))
sent = pb.EncodeResponse(outcomes=[pb.ItemOutcome(ticket=ticket), failed])
got = pb.EncodeResponse.FromString(sent.SerializeToString())
assert got == sent, got
item = pb.MediaItem(decoded=pb.DecodedMedia(shape=[4], data=bytes(16), rate_hz=0.5))
asked = pb.EncodeRequest(items=[item], settings={"media_io_kwargs": "{}"})
assert pb.EncodeRequest.FromString(asked.SerializeToString()) == asked
assert [outcome.WhichOneof("outcome") for outcome in got.outcomes] == ["ticket", "error"]
assert pb.DESCRIPTOR.name == "ec_producer/v1/encoder_cache.proto"
assert pb.DESCRIPTOR.services_by_name["EncoderCache"].full_name == "ec_producer.v1.EncoderCache"
assert pb.Ticket.__module__ == "producer.wire.pb.encoder_cache_pb2"
print(google.protobuf.__version__, api_implementation.Type())
"""


@pytest.fixture(scope="module", params=VERSIONS)
def protobuf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A version, and a directory that holds it with a googleapis-common-protos that works with it."""
    target = tmp_path_factory.mktemp("protobuf")
    packages = [f"protobuf=={request.param}", "googleapis-common-protos"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", str(target)]
    done = subprocess.run([*pip, *packages], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return request.param, target


@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_the_stubs_work_with(protobuf: tuple[str, Path], implementation: str) -> None:
    version, directory = protobuf
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)]),
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation,
    }
    command = [sys.executable, "-W", "error", "-c", ROUND_TRIP]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [version, implementation]
