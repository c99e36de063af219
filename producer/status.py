"""What people and probes are told of the service: one document from its metrics, its health and its settings.

It keeps no numbers of its own: each document reads them where they are. For any thread.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry

from producer import __version__
from producer.config import ServeConfig
from producer.core import ModelInfo
from producer.health import Health
from producer.recent_errors import RecentErrors
from producer.wire.contract import WIRE_VERSION

logger = logging.getLogger(__name__)

_STALE_S = 8.0
"""Health is asked every second; where it was not for longer than this, the event loop is stuck."""
_PREFIX = "ec_producer_"
_LIMITS = ("max_queue_items", "max_queue_bytes", "max_leases", "preprocess_workers", "lease_s", "stall_s")


class Samples:
    """All metrics of a registry, read once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in registry.collect():
            for sample in (one for one in family.samples if math.isfinite(one.value)):  # JSON has no other
                self._found.setdefault(sample.name, []).append((sample.labels, sample.value))

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name`, less our prefix, that carry `labels`; 0 without one."""
        return sum(value for given, value in self._all(name) if labels.items() <= given.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Such sums by the values of `label`, where they are not 0."""
        values = dict.fromkeys(given[label] for given, _ in self._all(name))
        sums = {value: self.value(name, **{label: value}, **labels) for value in values}
        return {value: one for value, one in sums.items() if one}

    def labels(self, name: str) -> dict[str, str]:
        """Of an info metric; empty where it was not set."""
        return dict(next((given for given, _ in self._all(name)), {}))

    def mean(self, name: str, **labels: str) -> dict[str, float]:
        """A histogram's sum and count: who reads two documents has the mean between them."""
        return {"sum": self.value(f"{name}_sum", **labels), "count": self.value(f"{name}_count", **labels)}

    def _all(self, name: str) -> Iterable[tuple[Mapping[str, str], float]]:
        return self._found.get(_PREFIX + name, self._found.get(name, ()))


class Status:
    """Follows the service from its first stage to its end, and tells of it."""

    def __init__(
        self,
        config: ServeConfig,
        registry: CollectorRegistry,
        errors: RecentErrors,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._registry = registry
        self._errors = errors
        self._monotonic = monotonic
        self._since_s = monotonic()
        self._stage = "starting"
        self._model: ModelInfo | None = None
        self._epoch = ""
        self._health: Health | None = None
        self._drains_until_s: float | None = None

    def enter(self, stage: str) -> None:
        """The start has come to `stage`."""
        self._stage = stage
        logger.info("starting: %s", stage)

    def serve(self, model: ModelInfo, health: Health, epoch: str) -> None:
        """The start is over; from here on `health` says how it is."""
        self._model, self._epoch, self._health = model, epoch, health

    def drain(self, drain_s: float) -> None:
        """The end has begun, and takes `drain_s` at most."""
        self._drains_until_s = self._monotonic() + drain_s

    def state(self) -> tuple[str, list[str]]:
        """One of "starting", "serving", "not serving", "draining"; and why, where it is not serving."""
        if self._drains_until_s is not None:
            left_s = max(0.0, self._drains_until_s - self._monotonic())
            return "draining", [f"work in hand and leases have {left_s:.0f} s left"]
        if self._health is None or self._health.checked_s is None:
            return "starting", [self._stage]
        silent_s = self._monotonic() - self._health.checked_s
        if silent_s > _STALE_S:
            return "not serving", [f"event loop: it has not asked its parts for {silent_s:.0f} s"]
        reasons = [f"{name}: {why}" for name, why in self._health.parts.items() if why]
        return ("not serving", reasons) if reasons else ("serving", [])

    def document(self) -> dict[str, Any]:
        """All that the page shows, for JSON; names end in their unit, and counts are since the start."""
        state, reasons = self.state()
        read = Samples(self._registry)
        return {
            "state": state,
            "reasons": reasons,
            "time_s": time.time(),
            "uptime_s": self._monotonic() - self._since_s,
            "model": self._describe_model(read),
            "parts": self._describe_parts(),
            "limits": {name: getattr(self._config, name) for name in _LIMITS},
            "queue": _queue(read),
            "totals": _totals(read),
            "graphs": _graphs(read),
            "device_bytes": read.by("device_bytes", "part"),
            "pool": _pool(read),
            "transports": [_transport(read, name) for name in self._config.transports],
            "workers": {"ready": read.value("preprocess_workers"), "deaths": read.value("preprocess_deaths_total")},
            "process": {
                "resident_bytes": read.value("process_resident_memory_bytes"),
                "open_files": read.value("process_open_fds"),
                "max_open_files": read.value("process_max_fds"),
            },
            "errors": [asdict(error) for error in self._errors.newest_first()],
        }

    def _describe_model(self, read: Samples) -> dict[str, Any]:
        model = self._model
        return {
            "name": self._config.model,
            "dtype": model.dtype if model else self._config.dtype,
            "fingerprint": model.fingerprint if model else "",
            "widths": model.widths if model else {},
            "attention": model.attention_backend if model else "",
            "fidelity": self._config.fidelity,
            "epoch": self._epoch,
            "listen": self._config.listen,
            "advertise": self._config.advertise,
            "versions": {
                "ec-producer": __version__,
                "wire": str(WIRE_VERSION),
                "python": read.labels("python_info").get("version", ""),
                **(model.versions if model else {}),
            },
        }

    def _describe_parts(self) -> list[dict[str, Any]]:
        parts = self._health.parts if self._health else {}
        return [{"name": name, "is_up": not why, "trouble": why} for name, why in parts.items()]


def _queue(read: Samples) -> dict[str, Any]:
    return {
        "items": read.value("queue_items"),
        "bytes": read.value("queue_bytes"),
        "wait_seconds": read.mean("queue_seconds"),
        "stalled_s": read.value("stalled_seconds"),
    }


def _totals(read: Samples) -> dict[str, Any]:
    return {
        "requests": read.by("requests_total", "code"),
        "items": read.by("items_total", "code"),
        "items_shared": read.by("items_shared_total", "source"),
        "steps": read.value("step_items_count"),
        "step_items": read.value("step_items_sum"),
        "non_finite_outputs": read.value("non_finite_outputs_total"),
        "stage_seconds": {
            stage: read.mean("stage_seconds", stage=stage) for stage in ("preprocess", "encode", "publish")
        },
    }


def _graphs(read: Samples) -> dict[str, Any]:
    real, padding = (read.by("graph_rows_total", "budget", kind=kind) for kind in ("real", "padding"))
    replays = read.by("graph_replays_total", "budget")
    budgets = sorted({int(one) for one in (*real, *padding, *replays)})
    return {
        "hits": read.value("graph_hits_total"),
        "misses": read.by("graph_misses_total", "reason"),
        "budgets": [
            {
                "rows": rows,
                "replays": replays.get(str(rows), 0.0),
                "real_rows": real.get(str(rows), 0.0),
                "padding_rows": padding.get(str(rows), 0.0),
            }
            for rows in budgets
        ],
    }


def _pool(read: Samples) -> dict[str, float]:
    return {
        "bytes": read.value("pool_bytes"),
        "used_bytes": read.value("pool_used_bytes"),
        "entries": read.value("pool_entries"),
        "pinned_entries": read.value("pool_pinned_entries"),
        "hits": read.value("pool_lookups_total", result="hit"),
        "misses": read.value("pool_lookups_total", result="miss"),
        "evictions": read.value("pool_evictions_total"),
        "leases": read.value("pool_leases"),
        "leases_granted": read.value("leases_granted_total"),
        "leases_expired": read.value("leases_expired_total"),
    }


def _transport(read: Samples, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "pulls": read.value("pulls_total", transport=name),
        "bytes": read.value("pull_bytes_total", transport=name),
        "failures": read.value("pull_failures_total", transport=name),
        "pull_seconds": read.mean("pull_seconds", transport=name),
    }
