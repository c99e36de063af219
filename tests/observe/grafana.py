"""Makes the Grafana dashboard of `tests.observe.panels`.

python -m tests.observe.grafana   # writes helm/ec-producer/files/dashboard.json
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.observe.panels import ROWS
from tests.observe.promql import Panel

FILES = Path(__file__).parents[2] / "helm" / "ec-producer" / "files"
DASHBOARD = FILES / "dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 41
COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8, "table": 8}
UP_OR_DOWN = [
    {"type": "value", "options": {"0": {"text": "DOWN", "color": "red"}, "1": {"text": "up", "color": "green"}}}
]

Json = dict[str, Any]


def dashboard() -> Json:
    """What Grafana imports; its variables choose the data source, namespaces and instances."""
    return {
        "uid": "ec-producer",
        "title": "ec-producer",
        "description": "The encoder service of multimodal models, and the vLLM servers that pull from it.",
        "tags": ["ec-producer", "vllm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_panels()),
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _variables() -> list[Json]:
    build = "ec_producer_build_info"
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    # Prometheus need not know of namespaces: outside Kubernetes 'All' has to match what has none.
    namespace = _labels_of("namespace", f"label_values({build}, namespace)") | {"allValue": ".*"}
    # Without `allValue`, 'All' is the producers' instances only; process metrics are everybody's.
    return [source, namespace, _labels_of("instance", f'label_values({build}{{namespace=~"$namespace"}}, instance)')]


def _labels_of(label: str, query: str) -> Json:
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": label},
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[Json]:
    """Each row's heading and its panels, from left to right and down."""
    number, y = 1, 0
    for title, panels in ROWS.items():
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": []} | _at(0, y, COLUMNS, 1)
        number, x, y, height = number + 1, 0, y + 1, 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            yield {"id": number} | _panel(panel) | _at(x, y, panel.width, HEIGHTS[panel.kind])
            number, x, height = number + 1, x + panel.width, max(height, HEIGHTS[panel.kind])
        y += height


def _at(x: int, y: int, width: int, height: int) -> Json:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> Json:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "targets": [_target(panel, *query, ref_id=chr(ord("A") + n)) for n, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _target(panel: Panel, expr: str, legend: str, *, ref_id: str) -> Json:
    how = {"instant": True, "format": "table"} if panel.kind == "table" else {"range": True, "format": "time_series"}
    return {"refId": ref_id, "datasource": SOURCE, "expr": expr, "legendFormat": legend, **how}


def _defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit, "mappings": UP_OR_DOWN if panel.is_state else []}
    if panel.kind == "timeseries":
        defaults |= {"min": 0} | ({"max": 1} if panel.unit == "percentunit" else {})
        stacking = {"mode": "normal" if panel.stacked else "none"}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 25 if panel.stacked else 0, "stacking": stacking}
    return defaults


def _options(panel: Panel) -> Json:
    if panel.kind == "timeseries":
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "stat":
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "graphMode": "none", "textMode": "auto", "colorMode": "value"}
    return {"showHeader": True}


if __name__ == "__main__":
    FILES.mkdir(parents=True, exist_ok=True)
    DASHBOARD.write_text(text())
