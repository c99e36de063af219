"""The dashboard and the rules name only what is measured, show all of it, and every alert is tried by `promtool`."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from consumer_shim import metrics as shim
from producer.metrics import Metrics
from producer.wire.metric import Declaration
from tests.observe import grafana
from tests.observe.queries import RULES, Declared, Query, dashboard_queries, rule_queries, rules, selectors

RULES_TEST = Path(grafana.__file__).with_name("rules_test.yaml")
ALERTS = [rule for rule in rules() if "alert" in rule]
QUERIES = [*dashboard_queries(), *rule_queries()]
DOCS = RULES.parents[3] / "docs"
TIMEOUT_S = 60.0


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def said_of(changed: dict[str, Any], folder: Path) -> str:
    """What promtool says where `changed` is in the place of the alert of that name; "" where all is well."""
    content = yaml.safe_load(RULES.read_text())
    alerts = [changed if one["alert"] == changed["alert"] else one for one in content["groups"][-1]["rules"]]
    content["groups"][-1]["rules"] = alerts
    (folder / "rules.yaml").write_text(yaml.safe_dump(content))
    healthy, *bad = yaml.safe_load(RULES_TEST.read_text())["tests"]
    tests = [healthy, *(one for one in bad if one["name"] == changed["alert"])]
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "test.yaml").write_text(yaml.safe_dump(content))
    done = promtool("test", "rules", folder / "test.yaml")
    return done.stdout + done.stderr if done.returncode else ""


# Names


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_every_metric_and_label_is_declared(query: Query) -> None:
    assert selectors(query.expr)
    assert Declared.now().problems(query.expr) == []


@pytest.mark.parametrize(
    "declaration", [*Metrics.declarations(), *shim.DECLARATIONS], ids=lambda declaration: declaration.name
)
def test_all_that_is_measured_is_shown_and_missed_when_it_goes(declaration: Declaration) -> None:
    left = Declared.now().without(declaration)
    assert any(left.problems(query.expr) for query in dashboard_queries())


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        ("rate(ec_producer_item_total[5m])", "no metric ec_producer_item_total"),
        ("sum(ec_producer_items)", "no metric ec_producer_items"),
        ("ec_producer_queue_seconds > 1", "no metric ec_producer_queue_seconds"),
        ('ec_producer_items_total{status="OK"}', "ec_producer_items_total has no label status of value 'OK'"),
        ('ec_producer_items_total{code=~"OK|FINE"}', "ec_producer_items_total has no label code of value 'FINE'"),
        ("sum by (reason) (rate(ec_producer_items_total[5m]))", "nothing here has the label reason"),
        ("sum without (le) (ec_producer_queue_seconds_sum)", "nothing here has the label le"),
        ("up == 0 and on (pod) ec_producer_build_info", "nothing here has the label pod"),
        ("ec_producer:hits:ratio > 0.5", "no metric ec_producer:hits:ratio"),
    ],
)
def test_what_is_not_declared_is_noticed(expr: str, problem: str) -> None:
    assert Declared.now().problems(expr) == [problem]


# The dashboard


def test_the_dashboard_is_what_its_panels_make() -> None:
    """After a change of the panels: `python -m tests.observe.grafana`."""
    assert grafana.DASHBOARD.read_text() == grafana.text()


def test_its_queries_are_promql(tmp_path: Path) -> None:
    """promtool reads them as rules."""
    recorded = [{"record": f"query_{number}", "expr": one.resolved()} for number, one in enumerate(dashboard_queries())]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stderr


def test_panels_lie_beside_each_other() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in grafana.dashboard()["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < grafana.COLUMNS, panel["title"]
        cells |= own


def test_panels_follow_the_variables_and_say_what_they_show() -> None:
    """All but the number of alerts, which Prometheus gives no instance of its own, are of the producers chosen."""
    content = grafana.dashboard()
    assert [one["name"] for one in content["templating"]["list"]] == ["datasource", "namespace", "instance"]
    panels = [panel for panel in content["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
            uses = re.findall(r"ec_producer_\w+|process_\w+", target["expr"])
            assert target["expr"].count('namespace=~"$namespace"') == len(uses), panel["title"]


# The rules


def test_the_rules_are_rules() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stderr


def test_an_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}, rule["alert"]
        assert rule["annotations"]["runbook_url"] == f"docs/operate.md#{rule['alert'].lower()}"


def test_the_runbook_has_every_alert() -> None:
    headings = re.findall(r"^## (EcProducer\w+)$", (DOCS / "operate.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in ALERTS)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_pages_name_only_metrics_that_there_are(page: Path) -> None:
    """As they are declared or as they are scraped."""
    ours = Declared.now().ours
    known = {*ours, *(one.full_name for one in ours.values())}
    named = set(re.findall(r"\bec_producer_\w*[a-z]\b", page.read_text()))
    assert named - known == set()


def test_alerts_fire_when_they_should_and_only_then() -> None:
    done = promtool("test", "rules", RULES_TEST)
    assert done.returncode == 0, done.stdout + done.stderr


def _always(rule: dict[str, Any]) -> dict[str, Any]:
    return rule | {"expr": 'label_replace(vector(1), "instance", "a", "", "")'}


def _at_once(rule: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if name != "for"}


def _never(rule: dict[str, Any]) -> dict[str, Any]:
    return rule | {"expr": "vector(1) > 2"}


def _changes() -> Iterator[Any]:
    """Each alert so that it always fires, that it never does, and, where it has to wait, that it does not."""
    for rule in ALERTS:
        for change in (_always, _never, *([_at_once] if "for" in rule else [])):
            yield pytest.param(change(rule), id=f"{rule['alert']}{change.__name__}")


@pytest.mark.parametrize("changed", [*_changes()])
def test_that_test_notices_each_alert(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert changed["alert"] in said_of(changed, tmp_path)


def test_the_test_has_every_alert() -> None:
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    healthy, *bad = tests
    names = [rule["alert"] for rule in ALERTS]
    assert [one["alertname"] for one in healthy["alert_rule_test"]] == names
    assert [one["name"] for one in bad] == names


def test_the_file_is_what_grafana_imports() -> None:
    content = json.loads(grafana.DASHBOARD.read_text())
    assert (content["uid"], content["schemaVersion"]) == ("ec-producer", grafana.SCHEMA_VERSION)
