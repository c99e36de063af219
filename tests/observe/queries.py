"""Every query of the dashboard and the rules, and whether what it names is declared."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from consumer_shim import metrics as shim
from producer.metrics import Metrics
from producer.wire.metric import Declaration
from tests.observe.grafana import DASHBOARD, FILES

RULES = FILES / "rules.yaml"
TARGET_LABELS = {"namespace", "job", "instance"}
"""What Prometheus adds to all that it scrapes."""
PROMETHEUS = {"up": set[str](), "ALERTS": {"alertname", "alertstate"}}
"""Prometheus' own series, and their labels."""
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "info": ("_info",),
}
RATE_INTERVAL = "30s"
"""What Grafana makes of the scrapes' interval; here, what there is of time."""
MAY_BE_EMPTY = {"ec_producer_device_bytes": "only a GPU has a plan of device memory"}
"""Metrics of which there may be nothing, and why; their names must be declared all the same."""

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SELECTOR = re.compile(rf"({_NAME})\{{([^}}]*)\}}")
_MATCHER = re.compile(rf'\s*({_NAME})\s*(=~|!~|!=|=)\s*"([^"]*)"\s*(?:,|$)')
_LABEL_LIST = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_OTHERS = re.compile(rf'"[^"]*"|\[[^\]]*\]|{_NAME}\s*\(|\b(?:and|or|unless|bool|offset)\b')


@dataclass(frozen=True, slots=True)
class Query:
    """One query: where it stands, and PromQL in which the dashboard's variables are still names."""

    where: str
    expr: str
    kind: str
    """`panel`, `variable`, `record` or `alert`."""

    def resolved(self, instances: str = ".*", rate_interval: str = RATE_INTERVAL) -> str:
        """As Grafana sends it with all namespaces and these `instances`, a regular expression, chosen."""
        values = {"$namespace": ".*", "$instance": instances, "$__rate_interval": rate_interval}
        expr = self.expr
        for name, value in values.items():
            expr = expr.replace(name, value)
        return expr


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric's name where it is used, and (label, operator, value) of each of its matchers."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Declared:
    """What may be named: each series' name with its declaration, or with its labels where it has none of ours."""

    ours: Mapping[str, Declaration]
    others: Mapping[str, Collection[str]] = field(default_factory=dict)

    @classmethod
    @cache
    def now(cls) -> "Declared":
        """All that the producer, the shim, Prometheus and the rules have."""
        every = (*Metrics.declarations(), *shim.DECLARATIONS)
        ours = {one.full_name + suffix: one for one in every for suffix in SUFFIXES[one.kind]}
        families = Metrics().registry.collect()
        process = {sample.name: set[str]() for family in families for sample in family.samples}
        recorded = {rule["record"]: set[str]() for rule in rules() if "record" in rule}
        return cls(ours, PROMETHEUS | recorded | {name: set() for name in process.keys() - ours.keys()})

    def without(self, declaration: Declaration) -> "Declared":
        return Declared({name: one for name, one in self.ours.items() if one is not declaration}, self.others)

    def problems(self, expr: str) -> list[str]:
        """What `expr` names that is not declared."""
        found, known = [], set(TARGET_LABELS)
        for selector in selectors(expr):
            if selector.metric not in self.ours and selector.metric not in self.others:
                found.append(f"no metric {selector.metric}")
                continue
            labels = self._labels(selector.metric)
            known |= labels
            found += [
                f"{selector.metric} has no label {label} of value {value!r}"
                for label, value in _values(selector)
                if label not in TARGET_LABELS and not self._allows(selector.metric, label, value)
            ]
        return found + [f"nothing here has the label {label}" for label in sorted(grouping(expr) - known)]

    def strays(self, expr: str, labels: Mapping[str, str]) -> list[str]:
        """Labels of an answer to `expr` that have values which no metric in it may have."""
        ours = [self.ours[one.metric] for one in selectors(expr) if one.metric in self.ours]
        return [
            f"{label} is {value!r}, which is not declared"
            for label, value in labels.items()
            if any(label in one.labels for one in ours) and not any(one.allows(label, value) for one in ours)
        ]

    def _labels(self, metric: str) -> set[str]:
        if metric in self.others:
            return set(self.others[metric])
        return {*self.ours[metric].labels, *(["le"] if metric.endswith("_bucket") else [])}

    def _allows(self, metric: str, label: str, value: str) -> bool:
        return label in self.others[metric] if metric in self.others else self.ours[metric].allows(label, value)


def dashboard_queries() -> list[Query]:
    """Of panels and variables, as they stand in the file."""
    dashboard = json.loads(DASHBOARD.read_text())
    row, found = "", []
    for panel in dashboard["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        for target in panel.get("targets", ()):
            found.append(Query(f"{row} / {panel['title']}", target["expr"], "panel"))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            selector, _ = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            found.append(Query(f"variable {variable['name']}", selector, "variable"))
    return found


def rules() -> list[dict[str, Any]]:
    """As they stand in the file."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def rule_queries() -> list[Query]:
    return [
        Query(rule.get("alert") or rule["record"], rule["expr"], "alert" if "alert" in rule else "record")
        for rule in rules()
    ]


def selectors(expr: str) -> list[Selector]:
    """Every use of a metric."""
    found = [Selector(name, _matchers(body)) for name, body in _SELECTOR.findall(expr)]
    rest = _OTHERS.sub(" ", _LABEL_LIST.sub(" ", _SELECTOR.sub(" ", expr)))
    return found + [Selector(name) for name in re.findall(rf"(?<![\w.]){_NAME}", rest)]


def grouping(expr: str) -> set[str]:
    """Labels by which is grouped or joined."""
    return {label for labels in _LABEL_LIST.findall(expr) for label in re.findall(_NAME, labels)}


def may_be_empty(expr: str) -> str:
    """Why there need be no answer; "" where there has to be one."""
    metrics = [selector.metric for selector in selectors(expr)]
    return next((why for name, why in MAY_BE_EMPTY.items() if name in metrics), "")


def _matchers(body: str) -> tuple[tuple[str, str, str], ...]:
    found = tuple(_MATCHER.findall(body))
    if _MATCHER.sub("", body).strip():
        raise ValueError(f"matchers are {body!r}; expected label, operator and a value in double quotes, each")
    return found


def _values(selector: Selector) -> Iterator[tuple[str, str]]:
    for label, operator, value in selector.matchers:
        for one in value.split("|") if "~" in operator else [value]:
            yield label, one
