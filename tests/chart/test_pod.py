"""The producer's pod: probes, end, command line, environment, devices, memory, model, placing."""

import json
from typing import Any

import pytest

from producer.wire.contract import SERVICE_NAME
from tests.chart.rendering import (
    LEAST,
    Values,
    container,
    environment_of,
    expand,
    flags,
    of_kind,
    pod,
    refusal,
    render,
    values_of,
    with_least,
    workload,
)

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def rendered(**values: Any) -> dict[str, Any]:
    """The container with these values."""
    return container(render(with_least(values)))


def spec(**values: Any) -> dict[str, Any]:
    """The pod's spec with these values."""
    found: dict[str, Any] = pod(render(with_least(values)))["spec"]
    return found


# probes and the end


def test_probes_ask_the_services_health() -> None:
    found = rendered()
    assert {name: found[name]["grpc"] for name in PROBES} == {
        name: {"port": 50051, "service": SERVICE_NAME} for name in PROBES
    }
    assert {"name": "grpc", "containerPort": 50051} in found["ports"]


def test_with_tls_probes_ask_the_metrics_port() -> None:
    found = rendered(tls={"enabled": True, "secret": "s"})
    assert {name: found[name]["httpGet"] for name in PROBES} == {
        name: {"path": "/healthz", "port": "metrics"} for name in PROBES
    }
    assert all("grpc" not in found[name] for name in PROBES)


def test_how_long_probes_wait() -> None:
    found = rendered(
        probes={
            "startup": {"timeoutSeconds": 601, "periodSeconds": 10},
            "readiness": {"periodSeconds": 3, "failureThreshold": 4},
            "liveness": {"periodSeconds": 20, "afterSeconds": 121},
        }
    )
    times = {name: (found[name]["periodSeconds"], found[name]["failureThreshold"]) for name in PROBES}
    assert times == {"startupProbe": (10, 61), "readinessProbe": (3, 4), "livenessProbe": (20, 7)}


def test_no_liveness_probe() -> None:
    assert "livenessProbe" not in rendered(probes={"liveness": {"enabled": False}})


def test_a_rollout_waits_for_as_long_as_a_start_may_take() -> None:
    found = workload(render(with_least({"probes": {"startup": {"timeoutSeconds": 3000}}})))
    assert found["spec"]["progressDeadlineSeconds"] > 3000


@pytest.mark.parametrize(("pre_stop", "deadline", "grace"), [(5, 30, 65), (0, 0, 30), (7, 12.5, 50), (300, 3600, 3930)])
def test_the_grace_period_covers_the_drain(pre_stop: int, deadline: float, grace: int) -> None:
    values = with_least({"drain": {"preStopSeconds": pre_stop, "deadlineSeconds": deadline}})
    found = render(values)
    assert pod(found)["spec"]["terminationGracePeriodSeconds"] == grace
    assert flags(container(found)["args"])["--drain-s"] == [f"{deadline:g}"]
    hook = container(found).get("lifecycle")
    assert hook == ({"preStop": {"sleep": {"seconds": pre_stop}}} if pre_stop else None)


# the command line


def test_the_least_command_line() -> None:
    found = rendered()
    assert found["command"] == ["ec-producer"]
    assert found["args"] == [
        "serve",
        "some/model",
        "--listen=0.0.0.0:50051",
        "--metrics-listen=0.0.0.0:9464",
        "--advertise=$(POD_IP):50051",
        "--drain-s=30",
        "--log-format=json",
        "--pool-bytes=4GiB",
        "--preprocess-workers=4",
    ]


def test_numbers_have_no_exponent() -> None:
    found = rendered(config={"max-item-pixels": 100_000_000, "max-video-pixels": 1 << 36, "pool-bytes": 1 << 31})
    words = flags(found["args"])
    assert words["--max-item-pixels"] == ["100000000"]
    assert words["--max-video-pixels"] == [str(1 << 36)]
    assert words["--pool-bytes"] == [str(1 << 31)]


def test_a_flag_is_there_or_not() -> None:
    assert "--eager" in rendered(config={"eager": True})["args"]
    assert "--eager" not in rendered(config={"eager": False})["args"]


def test_a_default_can_be_taken_away() -> None:
    assert not any(
        word.startswith("--preprocess-workers") for word in rendered(config={"preprocess-workers": None})["args"]
    )


def test_values_are_not_expanded_by_kubernetes() -> None:
    kwargs = {"a": "$(HOME) $$ 'x' \"y\" <&>"}
    found = rendered(config={"mm-processor-kwargs": kwargs})
    word = next(word for word in found["args"] if "mm-processor" in word)
    assert json.loads(expand(word, {"HOME": "wrong"}).partition("=")[2]) == kwargs


def test_a_statefulsets_pods_are_announced_by_name() -> None:
    manifests = render(with_least({"workload": {"kind": "StatefulSet"}}))
    headless = of_kind(manifests, "Service", "-headless")["metadata"]["name"]
    assert workload(manifests)["spec"]["serviceName"] == headless
    assert flags(container(manifests)["args"])["--advertise"] == [f"$(POD_NAME).{headless}.serving.svc:50051"]


def test_ipv6() -> None:
    found = flags(rendered(ipv6=True)["args"])
    assert (found["--listen"], found["--advertise"]) == (["[::]:50051"], ["[$(POD_IP)]:50051"])


def test_ports_are_the_same_everywhere() -> None:
    manifests = render(with_least({"ports": {"grpc": 6000, "metrics": 6001}}))
    found = flags(container(manifests)["args"])
    assert (found["--listen"], found["--metrics-listen"]) == (["0.0.0.0:6000"], ["0.0.0.0:6001"])
    assert container(manifests)["readinessProbe"]["grpc"]["port"] == 6000
    assert [one["port"] for one in of_kind(manifests, "Service")["spec"]["ports"]] == [6000]
    assert [one["port"] for one in of_kind(manifests, "Service", "-headless")["spec"]["ports"]] == [6000, 6001]


def test_services() -> None:
    manifests = render(LEAST)
    plain, headless = of_kind(manifests, "Service")["spec"], of_kind(manifests, "Service", "-headless")["spec"]
    assert headless["clusterIP"] == "None"
    assert "clusterIP" not in plain
    assert plain["sessionAffinity"] == "ClientIP"
    free = render(with_least({"service": {"sessionAffinity": False, "type": "LoadBalancer"}}))
    assert "sessionAffinity" not in of_kind(free, "Service")["spec"]
    assert of_kind(free, "Service")["spec"]["type"] == "LoadBalancer"


# secrets


def test_tls_and_tokens_are_mounted_as_folders() -> None:
    found = spec(tls={"enabled": True, "secret": "pair", "clientCaSecret": "ca"}, tokens={"secret": "list", "key": "t"})
    one = found["containers"][0]
    mounts = {mount["mountPath"]: mount for mount in one["volumeMounts"]}
    for flag in ("--tls-cert", "--tls-key", "--tls-client-ca", "--token-file"):
        folder, _, file = flags(one["args"])[flag][0].rpartition("/")
        assert mounts[folder]["readOnly"] is True
        assert "subPath" not in mounts[folder], "a subPath never sees a change of the secret"
        volume = next(volume for volume in found["volumes"] if volume["name"] == mounts[folder]["name"])
        assert file in [item["path"] for item in volume["secret"]["items"]]
        assert volume["secret"]["defaultMode"] == 0o440


def test_no_tls_without_enabled() -> None:
    assert not any("tls" in word or "token" in word for word in rendered(tls={"secret": "pair"})["args"])


# transports and devices


def test_transports() -> None:
    assert "--transport" not in flags(rendered()["args"])
    found = rendered(
        rdma={"enabled": True},
        transports={
            "nixl": {"enabled": True, "devices": "mlx5_0:1"},
            "mooncake": {"enabled": True, "protocol": "rdma"},
        },
    )
    words = flags(found["args"])
    assert words["--transport"] == ["nixl", "mooncake"]
    assert words["--nixl-devices"] == ["mlx5_0:1"]
    assert words["--mooncake-host"] == ["$(POD_IP)"]
    assert words["--mooncake-protocol"] == ["rdma"]
    assert environment_of(found) | {
        "UCX_TCP_PORT_RANGE": "18000-18199",
        "MC_MIN_RPC_PORT": "15000",
        "MC_MAX_RPC_PORT": "17000",
    } == environment_of(found)


def test_devices_are_limits() -> None:
    found = rendered(
        gpu={"resource": "nvidia.com/mig-1g.10gb"},
        rdma={"enabled": True, "resource": "rdma/hca", "count": 2},
        hugepages={"size": "2Mi", "amount": "512Mi"},
    )
    limits = found["resources"]["limits"]
    assert limits == {"memory": "20Gi", "nvidia.com/mig-1g.10gb": 1, "rdma/hca": 2, "hugepages-2Mi": "512Mi"}
    assert set(found["resources"]["requests"]) == {"cpu", "memory"}
    assert {"name": "hugepages", "mountPath": "/dev/hugepages"} in found["volumeMounts"]


def test_no_gpu() -> None:
    assert "nvidia.com/gpu" not in rendered(gpu={"enabled": False})["resources"]["limits"]
    assert rendered()["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_rdma_adds_no_capability_by_itself() -> None:
    assert "add" not in rendered(rdma={"enabled": True})["securityContext"]["capabilities"]


def test_shared_memory_is_a_volume_in_memory() -> None:
    volumes = {one["name"]: one for one in spec(shm={"sizeLimit": "3Gi"})["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}


# the model


def model_volume(found: dict[str, Any]) -> dict[str, Any]:
    volume: dict[str, Any] = next(one for one in found["volumes"] if one["name"] == "model")
    return volume


def test_a_hub_model() -> None:
    hub = {"tokenSecret": "hub", "tokenKey": "t", "cacheClaim": "cache", "endpoint": "https://hub.example"}
    found = spec(model={"revision": "r1", "trustRemoteCode": True, "hub": hub})
    one = found["containers"][0]
    assert one["args"][1] == "some/model"
    assert flags(one["args"])["--revision"] == ["r1"]
    assert "--trust-remote-code" in one["args"]
    assert model_volume(found)["persistentVolumeClaim"] == {"claimName": "cache"}
    have = environment_of(one)
    assert have["HF_HOME"] == "/models"
    assert have["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "t"}}
    assert have["HF_ENDPOINT"] == "https://hub.example"
    assert "HF_HUB_OFFLINE" not in have


def test_a_model_on_a_volume() -> None:
    model = {"source": "pvc", "name": "", "path": "a/b", "pvc": {"claim": "models", "subPath": "x"}}
    found = spec(model=model)
    one = found["containers"][0]
    assert one["args"][1] == "/models/a/b"
    assert model_volume(found)["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    mount = next(mount for mount in one["volumeMounts"] if mount["name"] == "model")
    assert mount == {"name": "model", "mountPath": "/models", "readOnly": True, "subPath": "x"}
    assert environment_of(one)["HF_HUB_OFFLINE"] == "1"


def test_a_model_that_an_init_container_brings() -> None:
    init = {"image": "registry.example/m:1", "command": ["cp"], "args": ["-R", "/model", "/models"], "env": []}
    found = spec(model={"source": "init", "name": "", "init": init})
    first = found["initContainers"][0]
    assert (first["image"], first["command"], first["args"]) == (init["image"], init["command"], init["args"])
    assert {"name": "model", "mountPath": "/models"} in first["volumeMounts"]
    assert found["containers"][0]["args"][1] == "/models"
    assert "emptyDir" in model_volume(found)


# placing and extras


def test_placing() -> None:
    values = values_of("everything")
    found = pod(render(values))["spec"]
    for name in ("nodeSelector", "tolerations", "affinity", "runtimeClassName", "priorityClassName", "schedulerName"):
        assert found[name] == values[name]
    assert found["shareProcessNamespace"] is True


def test_a_spread_gets_the_pods_own_labels() -> None:
    own = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
    manifests = render(
        with_least({"topologySpreadConstraints": [{**own, "labelSelector": {"matchLabels": {"a": "b"}}}]})
    )
    assert pod(manifests)["spec"]["topologySpreadConstraints"][0]["labelSelector"] == {"matchLabels": {"a": "b"}}
    filled = pod(render(LEAST))["spec"]["topologySpreadConstraints"][0]
    assert filled["labelSelector"]["matchLabels"].items() <= pod(render(LEAST))["metadata"]["labels"].items()


def test_extras() -> None:
    values = values_of("everything")
    found = pod(render(values))["spec"]
    one = found["containers"][0]
    assert one["envFrom"] == values["extraEnvFrom"]
    assert values["extraVolumes"][0] in found["volumes"]
    assert values["extraVolumeMounts"][0] in one["volumeMounts"]
    assert [other["name"] for other in found["containers"]] == ["producer", "beside"]
    assert [other["name"] for other in found["initContainers"]] == ["before"]
    assert rendered(extraArgs=["--new-flag=1"])["args"][-1] == "--new-flag=1"


def test_extra_environment_takes_the_charts_place() -> None:
    assert environment_of(rendered(extraEnv=[{"name": "HOME", "value": "/x"}]))["HOME"] == "/x"


def test_an_update_needs_no_spare_gpu() -> None:
    strategy = workload(render(LEAST))["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 0, "maxUnavailable": 1}


def test_files_for_a_stock_vllm() -> None:
    found = spec(files={"claim": "published"})
    assert flags(found["containers"][0]["args"])["--publish-files"] == ["/published"]
    assert {"name": "files", "mountPath": "/published"} in found["containers"][0]["volumeMounts"]


def test_mooncake_has_no_metadata_server_to_name() -> None:
    for key in ("metadataServer", "master"):
        values: Values = with_least({"transports": {"mooncake": {key: "x:1"}}})
        assert f"additional properties '{key}' not allowed" in refusal(values)
    assert "p2p" in refusal(with_least({"transports": {"mooncake": {"metadata": "http://x"}}}))
