"""What was rendered is what the service understands: its own process, started with exactly those arguments."""

from collections.abc import Iterator

import grpc
import pytest

from producer.wire.contract import SERVICE_NAME
from producer.wire.pb import encoder_cache_pb2 as pb
from producer.wire.pb.encoder_cache_pb2_grpc import EncoderCacheStub
from tests.chart.machine import TOKEN, Container, ask_grpc, end, on_this_machine
from tests.chart.rendering import merged, of_kind, render, values_of
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.processes import Service

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
NAMES = ("mooncake", "tls")
"""One with native gRPC probes and both library transports, and one with TLS; `make chart` starts all cases."""
BOTH = {"transports": {"nixl": {"enabled": True}}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Service, Container]]]:
    """Both, started at the same time, by the name of their case."""
    found: dict[str, tuple[Service, Container]] = {}
    try:
        for name in NAMES:
            manifests = render(merged(values_of(name), BOTH if name == "mooncake" else {}))
            container = on_this_machine(manifests, cached_checkpoint("qwen2_5_vl"), tmp_path_factory.mktemp(name))
            service = container.service(f"chart-{name}")
            found[name] = service, container
            service.start()
        yield found
    finally:
        for service, _ in found.values():
            service.request_stop()
        for service, _ in found.values():
            service.stop()


def test_until_it_can_serve_a_probe_fails(running: dict[str, tuple[Service, Container]]) -> None:
    for service, container in running.values():
        assert not service.was_ready
        assert container.probe("readinessProbe") != ""


@pytest.mark.parametrize("name", NAMES)
def test_probes_succeed_once_it_serves(running: dict[str, tuple[Service, Container]], name: str) -> None:
    service, container = running[name]
    service.wait_ready()
    assert {kind: container.probe(kind) for kind in PROBES} == dict.fromkeys(PROBES, "")


def test_a_probe_of_another_name_would_fail(running: dict[str, tuple[Service, Container]]) -> None:
    service, container = running["mooncake"]
    service.wait_ready()
    assert ask_grpc(container.ports[50051], "ec_producer.v1.EncoderCach") == "NOT_FOUND"


def test_a_grpc_probe_would_fail_with_tls(running: dict[str, tuple[Service, Container]]) -> None:
    service, container = running["tls"]
    service.wait_ready()
    assert ask_grpc(container.ports[50051], SERVICE_NAME) in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("name", NAMES)
def test_the_metrics_port_has_what_is_scraped_and_scaled_by(
    running: dict[str, tuple[Service, Container]], name: str
) -> None:
    service, container = running[name]
    service.wait_ready()
    text = container.get("/metrics")
    for family in ("ec_producer_queue_seconds_bucket", "ec_producer_queue_items"):
        assert f"\n{family}" in text


def test_it_listens_where_the_policy_lets_others_in_and_nowhere_else(
    running: dict[str, tuple[Service, Container]],
) -> None:
    service, container = running["mooncake"]
    service.wait_ready()
    policy = of_kind(render(merged(values_of("mooncake"), BOTH)), "NetworkPolicy")["spec"]
    ranges = [(port["port"], port.get("endPort", port["port"])) for rule in policy["ingress"] for port in rule["ports"]]
    found, reached = container.listening(service.pid)
    assert {port for port in reached if not any(low <= port <= high for low, high in ranges)} == set()
    unused = [(low, high) for low, high in ranges if not any(low <= port <= high for port in found)]
    assert unused == [], "a range that nothing listens on is open for nothing"


def test_tokens_and_certificates_are_those_of_the_secrets(running: dict[str, tuple[Service, Container]]) -> None:
    service, container = running["tls"]
    service.wait_ready()
    address = f"127.0.0.1:{container.ports[50051]}"
    made = container.folder / "made"
    ca, cert, key = ((made / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key"))
    options = [("grpc.ssl_target_name_override", "producer.example"), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options) as channel:
        stub = EncoderCacheStub(channel)
        info = stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=10)
        assert info.limits.max_client_items == 128
        with pytest.raises(grpc.RpcError) as refused:
            stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), options=options) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            EncoderCacheStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", NAMES)
def test_it_ends_within_the_grace_period(running: dict[str, tuple[Service, Container]], name: str) -> None:
    service, container = running[name]
    service.wait_ready()
    status, seconds = end(service, container)
    assert status == 0
    assert seconds < container.grace_s - container.pre_stop_s
