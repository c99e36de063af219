"""Who reaches what: each port belongs to somebody, and nobody else gets to it."""

from typing import Any

from tests.chart.rendering import (
    LEAST,
    Manifest,
    all_of,
    container,
    environment_of,
    of_kind,
    pods,
    render,
    values_of,
    with_least,
)

CONSUMERS, CLIENTS, MONITORING = (
    [{"podSelector": {"matchLabels": {"app": name}}}] for name in ("vllm", "gateway", "prometheus")
)
BOTH = {
    "nixl": {"enabled": True, "ports": {"first": 18000, "last": 18099}},
    "mooncake": {"enabled": True, "ports": {"first": 15000, "last": 15099}},
}


def policy(**values: Any) -> Manifest:
    """The policy's spec, of three kinds of peers and these values."""
    network = {"consumers": CONSUMERS, "clients": CLIENTS, "monitoring": MONITORING} | values.pop("network", {})
    manifests = render(with_least({"networkPolicy": network, "test": {"enabled": False}} | values))
    spec: Manifest = of_kind(manifests, "NetworkPolicy")["spec"]
    return spec


def admitted(spec: Manifest) -> dict[str, set[tuple[int, int]]]:
    """The ports, first to last, that each application reaches."""
    found: dict[str, set[tuple[int, int]]] = {}
    for rule in spec["ingress"]:
        for peer in rule["from"]:
            name = peer["podSelector"]["matchLabels"].get("app", "own")
            ports = {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
            found[name] = found.get(name, set()) | ports
    return found


def test_each_port_has_its_peers() -> None:
    grpc, metrics = (50051, 50051), (9464, 9464)
    assert admitted(policy()) == {"vllm": {grpc}, "gateway": {grpc}, "prometheus": {metrics}}
    assert admitted(policy(transports=BOTH)) == {
        "vllm": {grpc, (18000, 18099), (15000, 15099)},
        "gateway": {grpc},
        "prometheus": {metrics},
    }


def test_no_rule_admits_everybody() -> None:
    nobody = policy(network={"consumers": [], "clients": [], "monitoring": []}, transports=BOTH)
    assert nobody["ingress"] == []
    assert nobody["policyTypes"] == ["Ingress"]
    for spec in (policy(transports=BOTH), policy(network={"consumers": []}, transports=BOTH)):
        assert all(rule["from"] and rule["ports"] for rule in spec["ingress"])


def test_the_transports_listen_where_the_policy_lets_them() -> None:
    manifests = render(with_least({"transports": BOTH}))
    have = environment_of(container(manifests))
    assert have["UCX_TCP_PORT_RANGE"] == "18000-18099"
    assert (have["MC_MIN_RPC_PORT"], have["MC_MAX_RPC_PORT"]) == ("15000", "15099")


def test_the_default_is_the_own_namespace_and_monitoring() -> None:
    spec = of_kind(render(LEAST), "NetworkPolicy")["spec"]
    assert {} in [peer.get("podSelector") for peer in spec["ingress"][0]["from"]]
    assert not any("namespaceSelector" in peer for peer in spec["ingress"][0]["from"])
    assert spec["ingress"][-1]["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]


def test_the_releases_own_consumer_and_test_get_in() -> None:
    values = values_of("consumer") | {"networkPolicy": {"consumers": [], "monitoring": []}}
    manifests = render(values)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests)}
    spec = of_kind(manifests, "NetworkPolicy")["spec"]
    for rule, names in zip(
        spec["ingress"],
        [{"demo-ec-producer-consumer", "demo-ec-producer-test"}, {"demo-ec-producer-consumer"}],
        strict=True,
    ):
        wanted = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
        met = {name for name, own in labels.items() if any(one.items() <= own.items() for one in wanted)}
        assert met == names


def test_egress_is_open_or_named() -> None:
    assert "egress" not in policy()
    rule = {"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "ports": [{"port": 443, "protocol": "TCP"}]}
    spec = policy(network={"egress": {"enabled": True, "rules": [rule]}})
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert [port["port"] for port in spec["egress"][0]["ports"]] == [53, 53]
    assert spec["egress"][1:] == [rule]


def test_no_policy() -> None:
    assert all_of(render(with_least({"networkPolicy": {"enabled": False}})), "NetworkPolicy") == []
