"""Debian's Prometheus, on loopback, with its data in a folder of the caller's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.kit.ports import free_port
from tests.kit.processes import Service
from tests.kit.servers import HOST

SCRAPE_S = 1
TIMEOUT_S = 10.0


class QueryError(Exception):
    """Prometheus refuses a query; the text is its own."""


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]
    """(seconds of the clock, value), ascending; of an instant query, one."""


class Prometheus(Service):
    """`prometheus` that scrapes every second, with rules; its HTTP API as methods."""

    def __init__(self, folder: Path, rules: Path, jobs: Mapping[str, Sequence[str]]) -> None:
        """
        Args:
            folder: empty; for its settings and its data.
            rules: a file of recording rules and alerts.
            jobs: host:port of the targets, by the job's name.
        """
        self._address = f"{HOST}:{free_port()}"
        settings = folder / "prometheus.json"  # JSON is YAML
        settings.write_text(json.dumps(_settings(rules, jobs)))
        command = ["prometheus", f"--config.file={settings}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={self._address}", "--log.level=warn"]
        super().__init__("prometheus", command, ready=self._is_ready, cwd=folder)

    def query(self, expr: str) -> list[Series]:
        """What it answers now.

        Raises:
            QueryError: it does not.
        """
        found = self._get("/api/v1/query", query=expr)
        if found["resultType"] == "scalar":
            return [Series({}, [_point(found["result"])])]
        return [Series(one["metric"], [_point(one["value"])]) for one in found["result"]]

    def query_range(self, expr: str, start_s: float, end_s: float) -> list[Series]:
        """What it answers for each second of a time."""
        found = self._get("/api/v1/query_range", query=expr, start=start_s, end=end_s, step=SCRAPE_S)
        return [Series(one["metric"], [_point(point) for point in one["values"]]) for one in found["result"]]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its `health`, and alerts with their `state`."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **params: str | float) -> Any:
        answer = self._fetch(path, params).json()
        if answer["status"] != "success":
            raise QueryError(answer["error"])
        return answer["data"]

    def _is_ready(self) -> bool:
        try:
            return self._fetch("/-/ready", {}).is_success
        except httpx.TransportError:
            return False

    def _fetch(self, path: str, params: Mapping[str, str | float]) -> httpx.Response:
        return httpx.get(f"http://{self._address}{path}", params=params, trust_env=False, timeout=TIMEOUT_S)


def _settings(rules: Path, jobs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A namespace as Kubernetes would give it, so that what groups by it is tried out."""
    return {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": targets, "labels": {"namespace": "observe"}}]}
            for job, targets in jobs.items()
        ],
    }


def _point(value: Sequence[Any]) -> tuple[float, float]:
    return float(value[0]), float(value[1])
