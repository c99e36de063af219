"""Pulls on their way from the engine's process to vLLM's `/metrics`: vLLM carries `PullStats` from one to the other."""

import functools
from collections import deque
from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from consumer_shim.metrics import PULL_BYTES, PULL_SECONDS, PULLS, make, series
from consumer_shim.pull import Ended
from producer.wire.metric import Declaration

_MOST = 4096
"""Pulls between two reports; of more, the latest."""


class PullStats(ECConnectorStats):
    """Pulls that have ended. `data` is what the engine's message can hold: lists of words and numbers."""

    data: dict[str, Any]

    @classmethod
    def of(cls, data: dict[str, Any] | None) -> "PullStats":
        """With a dict of its own, since vLLM gives the same data to several loggers and one adds to its."""
        return cls({"pulls": data["pulls"] if data else []})

    @classmethod
    def take(cls, ended: "deque[Ended]") -> "PullStats | None":
        """All that is in `ended`, which pulls may add to meanwhile; None if nothing is."""
        found = [list(ended.popleft()) for _ in range(len(ended))]
        return cls({"pulls": found}) if found else None

    def reset(self) -> None:
        self.data = {"pulls": []}

    def aggregate(self, other: ECConnectorStats) -> "PullStats":
        self.data["pulls"] = [*self.data["pulls"], *other.data["pulls"]][-_MOST:]
        return self

    def is_empty(self) -> bool:
        return not self.data["pulls"]

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's line in the log."""
        done = [pull for pull in self._pulls() if pull.outcome == "ok"]
        seconds = sum(pull.seconds for pull in done)
        return {
            "pulls": len(done),
            "failed pulls": len(self.data["pulls"]) - len(done),
            "MB": round(sum(pull.num_bytes for pull in done) / 1e6, 1),
            "mean ms": round(1000 * seconds / len(done), 2) if done else 0.0,
        }

    def _pulls(self) -> Iterable[Ended]:
        return (Ended(*pull) for pull in self.data["pulls"])


class PullMetrics(ECConnectorPromMetrics):
    """The metrics of pulls, each with vLLM's labels behind its own. For the API server's process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = tuple(labelnames)
        self._pulls = _made(PULLS, metric_types[Counter], labels)
        self._seconds = _made(PULL_SECONDS, metric_types[Histogram], labels)
        self._bytes = _made(PULL_BYTES, metric_types[Counter], labels)
        for values in per_engine_labelvalues.values():  # or the first failure would not be seen as an increase
            for own in series(PULLS):
                self._pulls.labels(*own, *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for pull in PullStats.of(transfer_stats_data)._pulls():
            self._pulls.labels(pull.outcome, pull.transport, *values).inc()
            if pull.outcome == "ok":
                self._seconds.labels(pull.transport, *values).observe(pull.seconds)
                self._bytes.labels(pull.transport, *values).inc(pull.num_bytes)


@functools.cache
def _made(declared: Declaration, kind: Any, labels: tuple[str, ...]) -> Any:
    """Once a process: vLLM may make its loggers again, and forgets only those metrics whose names are its own."""
    return make(declared, kind, labels)
