"""What the service says of itself, at each stage of its life; the numbers are the metrics'."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from grpc_health.v1 import health

from producer import __version__
from producer.config import ServeConfig
from producer.core import ModelInfo
from producer.health import Health
from producer.metrics import Metrics
from producer.recent_errors import RecentErrors
from producer.status import Samples, Status
from tests.unit.conftest import Clock

MODEL = ModelInfo(
    model="some/model",
    fingerprint="f" * 64,
    dtype="bfloat16",
    widths={"image": 128},
    versions={"torch": "2.13", "vllm": "0.33"},
    attention_backend="FLASH_ATTN",
)
EPOCH = "00000000000000e0"


class Service:
    """A status over real metrics, a real ring and a real health whose probes a test sets."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("time.monotonic", clock)
        self.clock = clock
        self.metrics = Metrics()
        self.errors = RecentErrors(clock=clock)
        self.troubles = {"device": "", "transport grpc": ""}
        probes: dict[str, Callable[[], str]] = {name: lambda name=name: self.troubles[name] for name in self.troubles}
        self.health = Health(health.aio.HealthServicer(), probes, self.metrics)
        config = ServeConfig(model="some/model", transport=("nixl",), max_queue_items=8, preprocess_workers=3)
        self.status = Status(config, self.metrics.registry, self.errors, monotonic=clock)

    async def serve(self) -> None:
        self.status.serve(MODEL, self.health, EPOCH)
        await self.health.check()

    def document(self) -> Any:
        """As a reader of the JSON has it."""
        return json.loads(json.dumps(self.status.document(), allow_nan=False))


@pytest.fixture
def service(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Service:
    return Service(clock, monkeypatch)


# The service's life


def test_a_start_names_its_stage(service: Service) -> None:
    service.status.enter("loading the model")
    assert service.status.state() == ("starting", ["loading the model"])
    assert service.document()["parts"] == []


async def test_it_is_starting_until_its_parts_were_asked(service: Service) -> None:
    service.status.enter("encoding test items")
    service.status.serve(MODEL, service.health, EPOCH)
    assert service.status.state() == ("starting", ["encoding test items"])
    await service.health.check()
    assert service.status.state() == ("serving", [])


async def test_a_part_that_fails_is_named(service: Service) -> None:
    await service.serve()
    service.troubles["device"] = "the step in hand has made no progress for 9 s"
    await service.health.check()
    assert service.status.state() == ("not serving", ["device: the step in hand has made no progress for 9 s"])
    assert service.document()["parts"] == [
        {"name": "device", "is_up": False, "trouble": "the step in hand has made no progress for 9 s"},
        {"name": "transport grpc", "is_up": True, "trouble": ""},
    ]
    service.troubles["device"] = ""
    await service.health.check()
    assert service.status.state() == ("serving", [])


async def test_an_event_loop_that_is_stuck_is_not_serving(service: Service) -> None:
    """Other threads would go on to say what was true when it stopped."""
    await service.serve()
    service.clock.now_s += 7
    assert service.status.state() == ("serving", [])
    service.clock.now_s += 2
    assert service.status.state() == ("not serving", ["event loop: it has not asked its parts for 9 s"])


async def test_a_drain_says_how_long_it_may_take(service: Service) -> None:
    await service.serve()
    service.status.drain(20)
    service.clock.now_s += 15
    assert service.status.state() == ("draining", ["work in hand and leases have 5 s left"])
    service.clock.now_s += 15
    assert service.status.state() == ("draining", ["work in hand and leases have 0 s left"])


# The document


async def test_the_model_and_where_it_is(service: Service) -> None:
    await service.serve()
    service.clock.now_s += 3
    document = service.document()
    assert (document["state"], document["reasons"], document["uptime_s"]) == ("serving", [], 3.0)
    assert document["model"]["name"] == "some/model"
    assert document["model"]["fingerprint"] == "f" * 64
    assert document["model"]["attention"] == "FLASH_ATTN"
    assert document["model"]["widths"] == {"image": 128}
    assert document["model"]["epoch"] == EPOCH
    assert document["model"]["versions"].items() >= {"ec-producer": __version__, "torch": "2.13", "wire": "1"}.items()
    assert document["limits"]["max_queue_items"] == 8
    assert document["limits"]["preprocess_workers"] == 3


def test_before_the_model_is_loaded_the_settings_are_shown(service: Service) -> None:
    model = service.document()["model"]
    assert (model["name"], model["dtype"], model["fingerprint"]) == ("some/model", "auto", "")


def test_numbers_are_the_metrics_own(service: Service) -> None:
    metrics = service.metrics
    metrics.items.labels("OK").inc(5)
    metrics.items.labels("INTERNAL").inc(2)
    metrics.requests.labels("Encode", "OK").inc(3)
    metrics.requests.labels("Acquire", "OK").inc(4)
    metrics.queue_items.set(6)
    metrics.queue_bytes.set(7000)
    metrics.queue_seconds.observe(0.5)
    metrics.stage_seconds.labels("encode").observe(0.25)
    metrics.step_items.observe(4)
    metrics.items_shared.labels("pool").inc(8)
    metrics.non_finite_outputs.inc(9)
    metrics.preprocess_workers.set(2)
    document = service.document()
    assert document["totals"]["items"] == {"OK": 5, "INTERNAL": 2}
    assert document["totals"]["requests"] == {"OK": 7}
    assert document["totals"]["items_shared"] == {"pool": 8}
    assert document["totals"]["non_finite_outputs"] == 9
    assert (document["totals"]["steps"], document["totals"]["step_items"]) == (1, 4)
    assert document["totals"]["stage_seconds"]["encode"] == {"sum": 0.25, "count": 1}
    assert document["queue"] == {
        "items": 6,
        "bytes": 7000,
        "wait_seconds": {"sum": 0.5, "count": 1},
        "stalled_s": 0,
    }
    assert document["workers"]["ready"] == 2
    assert document["process"]["resident_bytes"] > 0
    assert document["process"]["open_files"] > 0


def test_graphs_by_budget(service: Service) -> None:
    metrics = service.metrics
    metrics.graph_hits.inc(9)
    metrics.graph_misses.labels("too_large").inc(2)
    for budget, real, padding in (("1024", 900, 124), ("64", 50, 14)):
        metrics.graph_replays.labels(budget).inc()
        metrics.graph_rows.labels(budget, "real").inc(real)
        metrics.graph_rows.labels(budget, "padding").inc(padding)
    assert service.document()["graphs"] == {
        "hits": 9,
        "misses": {"too_large": 2},
        "budgets": [
            {"rows": 64, "replays": 1, "real_rows": 50, "padding_rows": 14},
            {"rows": 1024, "replays": 1, "real_rows": 900, "padding_rows": 124},
        ],
    }


def test_device_pool_and_leases(service: Service) -> None:
    metrics = service.metrics
    metrics.device_bytes.labels("weights").set(1 << 30)
    metrics.pool_bytes.set_function(lambda: 100)
    metrics.pool_used_bytes.set_function(lambda: 60)
    metrics.pool_entries.set(5)
    metrics.pool_pinned_entries.set(4)
    metrics.pool_leases.set(3)
    metrics.pool_lookups.labels("hit").inc(2)
    metrics.pool_lookups.labels("miss").inc(6)
    metrics.pool_evictions.set_function(lambda: 7)
    metrics.leases_granted.set_function(lambda: 8)
    metrics.leases_expired.set_function(lambda: 9)
    document = service.document()
    assert document["device_bytes"] == {"weights": 1 << 30}
    assert document["pool"] == {
        "bytes": 100,
        "used_bytes": 60,
        "entries": 5,
        "pinned_entries": 4,
        "hits": 2,
        "misses": 6,
        "evictions": 7,
        "leases": 3,
        "leases_granted": 8,
        "leases_expired": 9,
    }


def test_the_transports_that_are_offered(service: Service) -> None:
    metrics = service.metrics
    metrics.pulls.labels("nixl").inc(2)
    metrics.pull_bytes.labels("nixl").inc(2048)
    metrics.pull_seconds.labels("nixl").observe(0.5)
    metrics.pull_failures.labels("nixl").inc(3)
    transports = service.document()["transports"]
    assert [one["name"] for one in transports] == ["shm", "nixl", "grpc"]
    assert transports[1] == {
        "name": "nixl",
        "pulls": 2,
        "bytes": 2048,
        "failures": 3,
        "pull_seconds": {"sum": 0.5, "count": 1},
    }


def test_recent_errors_are_the_rings(service: Service) -> None:
    service.errors.add("item", "INVALID_ARGUMENT", "MEDIA_UNREADABLE")
    assert service.document()["errors"] == [
        {"scope": "item", "code": "INVALID_ARGUMENT", "reason": "MEDIA_UNREADABLE", "count": 1, "last_s": 1000.0}
    ]


def test_no_secret_is_shown(clock: Clock) -> None:
    secret = {"tls_cert": "/secret/a", "tls_key": "/secret/b", "tls_client_ca": "/secret/c", "token_file": "/secret/d"}
    config = ServeConfig(model="m", mm_processor_kwargs={"secret": 1}, **secret)
    document = Status(config, Metrics().registry, RecentErrors(clock=clock)).document()
    assert "secret" not in json.dumps(document)


def test_a_value_that_json_does_not_have_is_left_out(service: Service) -> None:
    service.metrics.queue_items.set(float("nan"))
    service.metrics.queue_bytes.set(float("inf"))
    assert service.document()["queue"]["items"] == service.document()["queue"]["bytes"] == 0


def test_every_metric_that_is_read_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was renamed would read as 0 for ever."""
    asked: set[str] = set()
    read = Samples._all
    monkeypatch.setattr(Samples, "_all", lambda self, name: asked.add(name) or read(self, name))
    metrics = Metrics()
    metrics.model.info({"model": "m"})
    Status(ServeConfig(model="m"), metrics.registry, RecentErrors()).document()
    families = {family.name: family.type for family in metrics.registry.collect()}
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_sum", "_count"), "info": ("_info",)}
    named = {name + suffix for name, kind in families.items() for suffix in suffixes[kind]}
    assert len(asked) > 30
    assert {name for name in asked if name not in named and f"ec_producer_{name}" not in named} == set()
