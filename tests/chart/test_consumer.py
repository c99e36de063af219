"""The LLM-only vLLM beside the producers: what its command line says of them is what they have."""

import json
from typing import Any

import pytest

from consumer_shim.config import ShimConfig
from tests.chart.rendering import (
    Manifest,
    Values,
    component,
    environment_of,
    expand,
    flags,
    merged,
    notes,
    of_kind,
    pods,
    render,
    values_of,
    with_least,
)

TLS: Values = {
    "tls": {"enabled": True, "secret": "s", "clientCaSecret": "c"},
    "tokens": {"secret": "t"},
    "consumer": {"tlsCaSecret": "ca", "tlsSecret": "pair", "tlsServerName": "producer.example", "tokenSecret": "own"},
}


def consumer(**values: Any) -> tuple[Manifest, dict[str, list[str]]]:
    """The pod's spec, and its flags as vLLM gets them."""
    manifests = render(merged(with_least({"consumer": {"enabled": True}}), values))
    spec: Manifest = of_kind(manifests, "Deployment", "-consumer")["spec"]["template"]["spec"]
    words = [expand(word, {"POD_IP": "10.0.0.9"}) for word in spec["containers"][0]["args"]]
    return spec, flags(words)


def shim(**values: Any) -> ShimConfig:
    """The shim's settings, read as vLLM and the shim read them."""
    transfer = json.loads(consumer(**values)[1]["--ec-transfer-config"][0])
    assert transfer | {"ec_connector_extra_config": None} == {
        "ec_connector": "ECProducerConnector",
        "ec_connector_module_path": "consumer_shim.connector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": None,
    }
    return ShimConfig.from_extra_config(transfer["ec_connector_extra_config"])


def test_no_consumer_by_default() -> None:
    assert {component(pod) for _, pod in pods(render(with_least({})))} == {"producer", "test"}


def test_it_loads_no_encoder_and_asks_the_release() -> None:
    spec, found = consumer()
    assert spec["containers"][0]["command"] == ["vllm"]
    assert json.loads(found["--limit-mm-per-prompt"][0]) == {"image": 0, "video": 0}
    assert found["--middleware"] == ["consumer_shim.middleware.EncodeMiddleware"]
    assert shim().producers == ("demo-ec-producer.serving.svc:50051",)


def test_notes_say_where_it_is() -> None:
    assert "http://demo-ec-producer-consumer.serving.svc:8000/v1" in notes(values_of("consumer"))
    assert "OpenAI" not in notes(with_least({}))


def test_each_replica_has_its_address() -> None:
    stateful = {"workload": {"kind": "StatefulSet", "replicas": 2}}
    name = "demo-ec-producer"
    assert shim(**stateful).producers == tuple(f"{name}-{i}.{name}-headless.serving.svc:50051" for i in (0, 1))
    scaled = {"workload": {"kind": "StatefulSet"}, "autoscaling": {"kind": "keda", "maxReplicas": 7}}
    assert len(shim(**scaled).producers) == 7


def test_settings_of_both_sides_agree() -> None:
    found = shim(
        transports={"mooncake": {"enabled": True, "protocol": "rdma"}},
        rdma={"enabled": True},
        consumer={"shim": {"region_bytes": 1 << 31, "encode_timeout_s": 12.5, "transport": "mooncake"}},
    )
    assert (found.mooncake_host, found.mooncake_protocol) == ("10.0.0.9", "rdma")
    assert (found.region_bytes, found.encode_timeout_s, found.transport) == (1 << 31, 12.5, "mooncake")
    kwargs = {"mm-processor-kwargs": {"max_pixels": 1003520}, "media-io-kwargs": {"video": {"num_frames": 8}}}
    flags = consumer(config=kwargs)[1]
    assert {name: json.loads(flags[f"--{name}"][0]) for name in kwargs} == kwargs


def test_texts_are_meant_as_they_are() -> None:
    found = shim(consumer={"shim": {"nixl_devices": "$(POD_IP) $$"}}, transports={"mooncake": {"enabled": True}})
    assert (found.nixl_devices, found.mooncake_host) == ("$(POD_IP) $$", "10.0.0.9")


def test_credentials_are_files_that_are_mounted() -> None:
    spec, _ = consumer(**TLS)
    found = shim(**TLS).security
    assert found.tls_server_name == "producer.example"
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume.get("secret", {}) for volume in spec["volumes"]}
    for path, secret in {
        found.tls_ca: "ca",
        found.tls_cert: "pair",
        found.tls_key: "pair",
        found.token_file: "own",
    }.items():
        folder, _, file = path.rpartition("/")
        volume = volumes[mounts[folder]]
        assert volume["secretName"] == secret
        assert file in [item["path"] for item in volume["items"]]


def test_several_gpus() -> None:
    spec, found = consumer(consumer={"gpu": {"count": 2}})
    assert found["--tensor-parallel-size"] == ["2"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_a_blank_image_wants_the_encoder() -> None:
    none = {"consumer": {"limitMmPerPrompt": {"image": None, "video": None}}}
    assert "--limit-mm-per-prompt" not in consumer(**none)[1]


def test_the_same_model_by_the_same_way() -> None:
    values = values_of("mooncake") | {"consumer": {"enabled": True}}
    manifests = render(values)
    words = {name: pod["spec"]["containers"][0]["args"][1] for name, pod in pods(manifests) if component(pod) != "test"}
    assert set(words.values()) == {"/models/checkpoint"}
    assert len(words) == 2
    spec = of_kind(manifests, "Deployment", "-consumer")["spec"]["template"]["spec"]
    assert spec["initContainers"][0]["image"] == values["model"]["init"]["image"]
    assert environment_of(spec["containers"][0])["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("missing", ["tlsCaSecret", "tlsSecret", "tokenSecret"])
def test_helms_test_is_left_out_where_it_could_not_get_in(missing: str) -> None:
    values = with_least(merged(TLS, {"consumer": {missing: ""}}))
    assert not any(name.endswith("-test") for name, _ in pods(render(values)))
    assert "test demo" not in notes(values)


@pytest.mark.parametrize("values", [{}, TLS])
def test_helms_test_encodes_a_picture_through_the_service(values: Values) -> None:
    from producer.cli import main

    manifests = render(with_least(values))
    pod = of_kind(manifests, "Pod", "-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    one = pod["spec"]["containers"][0]
    assert one["args"][:3] == ["encode", "/media/test.png", "--address=demo-ec-producer.serving.svc:50051"]
    picture = of_kind(manifests, "ConfigMap", "-test")["binaryData"]["test.png"]
    assert picture.startswith("iVBORw0KGgo")
    with pytest.raises(SystemExit) as ended:
        main([*one["args"], "--help"])
    assert ended.value.code == 0
