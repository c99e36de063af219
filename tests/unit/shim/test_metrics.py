"""What the shim counts: pulls, on vLLM's own way from the engine to its loggers, and calls to producers."""

import os
import subprocess
import sys
import uuid
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorLogging, ECConnectorProm
from vllm.v1.metrics.stats import SchedulerStats

from consumer_shim import metrics
from consumer_shim.connector import ECProducerConnector
from consumer_shim.metrics import DECLARATIONS, OUTCOMES, TRANSPORTS
from consumer_shim.pull import Ended
from consumer_shim.pull_metrics import PullMetrics, PullStats
from tests.kit.samples import strangers, total

OK = Ended("ok", "nixl", 0.003, 4096)
GONE = Ended("refused", "none", 0.0, 0)


@pytest.fixture
def vllm_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, as far as its loggers look at it."""
    monkeypatch.setattr(ECConnectorFactory, "get_connector_class", lambda config: ECProducerConnector)
    return SimpleNamespace(ec_transfer_config=SimpleNamespace(ec_connector="ECProducerConnector"))


@pytest.fixture
def model() -> str:
    """A name that no other test's series have: the registry is the process's."""
    return str(uuid.uuid4())


def sent(*pulls: Ended) -> Any:
    """What the API server gets of pulls that ended in the engine's process."""
    stats = PullStats.take(deque(pulls))
    assert stats is not None
    message = msgspec.msgpack.encode(SchedulerStats(ec_connector_stats=stats.data))
    return msgspec.msgpack.decode(message, type=SchedulerStats).ec_connector_stats


def prom(vllm_config: Any, model: str, engines: int = 1) -> ECConnectorProm:
    """vLLM's logger of connectors."""
    return ECConnectorProm(
        vllm_config, ["model_name", "engine"], {index: [model, str(index)] for index in range(engines)}
    )


# Pulls


def test_pulls_reach_the_registry_with_vllms_labels(vllm_config: Any, model: str) -> None:
    logger = prom(vllm_config, model, engines=2)
    logger.observe(sent(OK, OK, GONE), 0)
    logger.observe(sent(OK), 1)
    own = {"model_name": model, "engine": "0"}
    assert total(REGISTRY, "shim_pulls_total", outcome="ok", transport="nixl", **own) == 2
    assert total(REGISTRY, "shim_pulls_total", outcome="refused", transport="none", **own) == 1
    assert total(REGISTRY, "shim_pulls_total", **own) == 3
    assert total(REGISTRY, "shim_pull_bytes_total", transport="nixl", **own) == 8192
    assert total(REGISTRY, "shim_pull_seconds_count", **own) == 2
    assert total(REGISTRY, "shim_pull_seconds_sum", transport="nixl", **own) == pytest.approx(0.006)
    assert total(REGISTRY, "shim_pulls_total", model_name=model) == 4
    assert strangers(REGISTRY.collect(), DECLARATIONS, ("model_name", "engine")) == []


def test_loggers_may_be_made_again(vllm_config: Any, model: str) -> None:
    for _ in range(2):
        prom(vllm_config, model).observe(sent(OK))
    assert total(REGISTRY, "shim_pulls_total", model_name=model) == 2


def test_all_outcomes_are_there_from_the_start(vllm_config: Any, model: str) -> None:
    prom(vllm_config, model)
    for outcome in OUTCOMES:
        for transport in (*TRANSPORTS, "none"):
            labels = {"outcome": outcome, "transport": transport, "model_name": model, "engine": "0"}
            assert REGISTRY.get_sample_value("ec_producer_shim_pulls_total", labels) == 0


def test_vllms_log_has_a_line_of_them(vllm_config: Any) -> None:
    lines = []
    logger = ECConnectorLogging(vllm_config.ec_transfer_config)
    logger.log(lambda *words: lines.append(words[0] % words[1:]))
    data = sent(OK, GONE)
    logger.observe(data)
    logger.observe(sent(OK))
    for _ in range(2):
        logger.log(lambda *words: lines.append(words[0] % words[1:]))
    assert lines == ["EC Transfer metrics: pulls=2, failed pulls=1, MB=0.0, mean ms=3.0"]
    assert len(data["pulls"]) == 2  # others observe the same data


def test_only_failures_make_a_line_too() -> None:
    assert PullStats.of(sent(GONE)).reduce() == {"pulls": 0, "failed pulls": 1, "MB": 0.0, "mean ms": 0.0}


def test_what_is_gathered_is_bounded() -> None:
    stats = PullStats.of(None)
    assert stats.is_empty()
    for _ in range(3):
        stats = stats.aggregate(PullStats.of(sent(*[OK] * 2000)))
    assert len(stats.data["pulls"]) == 4096
    stats.reset()
    assert stats.is_empty()


def test_what_has_ended_is_taken_once() -> None:
    ended = deque([OK, GONE])
    taken = PullStats.take(ended)
    assert taken is not None
    assert taken.data == {"pulls": [list(OK), list(GONE)]}
    assert PullStats.take(ended) is None


def test_metrics_may_be_of_other_classes_than_prometheus_clients(model: str) -> None:
    """Ray Serve's take no positional arguments, and make a copy for labels."""
    made: dict[str, list[str]] = {}

    class Other:
        def __init__(self, name: str, documentation: str = "", labelnames: Any = None, buckets: Any = None) -> None:
            made[name] = labelnames

        def labels(self, *values: object) -> "Other":
            return self

        def inc(self, amount: float = 1.0) -> None: ...
        def observe(self, amount: float) -> None: ...

    config: Any = SimpleNamespace(ec_transfer_config=None)
    kinds = {Gauge: Other, Counter: Other, Histogram: Other}
    PullMetrics(config, kinds, ["model_name", "engine"], {0: [model, "0"]}).observe(sent(OK))
    assert made["ec_producer_shim_pulls"] == ["outcome", "transport", "model_name", "engine"]


# Calls


def test_calls_and_encodes_again_are_counted() -> None:
    metrics.register()
    before = [total(REGISTRY, name) for name in ("shim_encode_seconds_count", "shim_reencodes_total")]
    ok = total(REGISTRY, "shim_encodes_total", code="OK")
    metrics.count_encode("OK", 0.25)
    metrics.count_encode("UNAVAILABLE", 0.25)
    metrics.count_reencode()
    after = [total(REGISTRY, name) for name in ("shim_encode_seconds_count", "shim_reencodes_total")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [2, 1]
    assert total(REGISTRY, "shim_encodes_total", code="OK") == ok + 1
    assert strangers(REGISTRY.collect(), DECLARATIONS, ("model_name", "engine")) == []


def test_without_prometheus_client_nothing_is_counted() -> None:
    """A gateway needs the base package only."""
    code = """
import sys
sys.modules["prometheus_client"] = None
import consumer_shim.gateway
from consumer_shim import metrics
metrics.register()
metrics.count_encode("OK", 0.1)
metrics.count_reencode()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_several_api_servers_add_up(tmp_path: Path) -> None:
    """As vLLM runs them: each process writes to the folder, and whichever is scraped reads all."""
    count = "from consumer_shim import metrics; metrics.register(); metrics.count_encode('OK', 0.1)"
    scrape = """
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry
print(generate_latest(get_prometheus_registry()).decode())
"""
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", count], check=True, timeout=60, env=env)
    done = subprocess.run(
        [sys.executable, "-c", scrape], check=True, timeout=120, env=env, capture_output=True, text=True
    )
    found = list(text_string_to_metric_families(done.stdout[done.stdout.index("# ") :]))
    assert strangers(found, DECLARATIONS) == []
    values = {
        sample.name: sample.value
        for family in found
        for sample in family.samples
        if sample.labels.get("code") in (None, "OK")
    }
    assert values["ec_producer_shim_encodes_total"] == values["ec_producer_shim_encode_seconds_count"] == 2
