"""What docs/*.md name exists: flags, metrics, reasons, alerts, settings, files, links. deploy.md's values render."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from helm_python import Chart

from consumer_shim.config import ShimConfig
from producer import cli
from producer.config import ServeConfig
from producer.metrics import Metrics
from producer.wire.contract import Reason
from producer.wire.metric import Declaration
from tests.chart.kubernetes import NEWEST, OLDEST, trouble

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "ec-producer"
PAGES = sorted(ROOT.glob("docs/*.md"))
OURS = [page for page in PAGES if page.name in ("deploy.md", "operate.md", "tune.md", "upgrade.md")]
LINKING = [*PAGES, *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"))]

OTHERS_FLAGS = {
    "vllm": {"--limit-mm-per-prompt", "--middleware", "--gpu-memory-utilization", "--ec-transfer-config"},
    "docker, helm, kubectl": {"--build-arg", "--target", "--sbom", "--create-namespace", "--previous"},
}
OTHERS_WORDS = {"NaN", "SERVING", "NOT_SERVING", "SIGTERM", "SIGKILL", "HEALTHCHECK", "WIRE_VERSION"}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "info": ("_info",), "histogram": ("", "_bucket", "_sum", "_count")}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def code(page: Path) -> list[str]:
    """What stands in backticks, and the lines of blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    return inline + [line for block in blocks for line in block.splitlines()]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def help_of(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    return shown.getvalue()


def commands() -> list[str]:
    """Those of `ec-producer`, as its usage has them."""
    usage = help_of().partition("\n\n")[0]
    return re.findall(r"[a-z-]+", usage.partition("[--version]")[2].replace("...", ""))


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Of all commands, as their help says."""
    texts = [help_of(), *(help_of(command) for command in commands())]
    return {flag for text in texts for flag in re.findall(r"--[a-z][a-z0-9-]+", text)}


@pages
def test_every_flag_exists(page: Path, flags: set[str]) -> None:
    named = {flag for words in code(page) for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", words)}
    assert named - flags - set().union(*OTHERS_FLAGS.values()) == set()


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_every_command_exists(page: Path) -> None:
    named = {name for words in code(page) for name in re.findall(r"^ec-producer ([a-z]+)", words)}
    assert named - set(commands()) == set()


# Metrics


def declared() -> dict[str, Declaration]:
    from consumer_shim import metrics as shim

    return {one.full_name: one for one in (*Metrics.declarations(), *shim.DECLARATIONS)}


def find(name: str) -> Declaration | None:
    """What declares the sample `name`."""
    for full_name, one in declared().items():
        if name in {full_name + suffix for suffix in SUFFIXES[one.kind]}:
            return one
    return None


@pages
def test_every_metric_exists_with_its_labels(page: Path) -> None:
    used = {match for words in code(page) for match in re.findall(r"\b(ec_producer_[a-z_]*[a-z])\b(\{[^}]*\})?", words)}
    for name, selector in used:
        one = find(name)
        assert one, f"{name}: there is no such metric"
        for label, value in re.findall(r'(\w+)="([^"]*)"', selector):
            assert one.allows(label, value), f"{name} has no {label}={value}"


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.name)
def test_every_reason_and_status_exists(page: Path) -> None:
    known = {reason.value for reason in Reason} | {status.name for status in grpc.StatusCode} | OTHERS_WORDS
    known |= set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    named = {word for word in code(page) if re.fullmatch(r"[A-Z][A-Z]+(_[A-Z]+)*", word)}
    assert named - known == set()


# Alerts


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    text = (ROOT / "docs" / "operate.md").read_text()
    assert re.findall(r"^## (EcProducer\w+)$", text, re.MULTILINE) == list(alerts())
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    for section in sections:
        if section.startswith("EcProducer"):
            parts = re.findall(r"^- \*\*(\w+):\*\* \S", section, re.MULTILINE)
            assert parts == ["Means", "See", "Causes", "Do"], section[:30]


def test_every_alert_leads_to_its_section() -> None:
    for name, rule in alerts().items():
        page, _, anchor = rule["annotations"]["runbook_url"].rpartition("#")
        assert anchor == name.lower()
        assert page.endswith("docs/operate.md")
        assert anchor in anchors(ROOT / "docs" / "operate.md")


@pages
def test_no_other_alert_is_named(page: Path) -> None:
    assert set(re.findall(r"\bEcProducer[A-Z]\w+", page.read_text())) - alerts().keys() == set()


# Files and settings


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}"


@pages
def test_every_file_exists(page: Path) -> None:
    folders = "tests|bench|image|docs|helm|producer|consumer_shim|proto"
    named = {word for words in code(page) for word in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]+\w", words)}
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.name)
def test_every_setting_of_shim_and_chart_exists(page: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for word in code(page):
        if re.fullmatch(r"[a-z]\w*(\.[a-zA-Z]\w*)+", word) and word.split(".")[0] in values:
            found: Any = values
            for key in word.split("."):
                found = found.get(key) if isinstance(found, dict) else None
                assert found is not None, f"{word} is no value of the chart"
        elif re.fullmatch(r"(tls|mooncake|nixl|pull|encode|max|region)_[a-z_]+|producers", word):
            names = ShimConfig.__dataclass_fields__.keys() | ServeConfig.__dataclass_fields__.keys()
            assert word in names | {"max_pixels"}, f"{word} is no setting"


VALUES = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("values", VALUES)
def test_the_values_of_deploy_render_to_what_kubernetes_takes(values: str) -> None:
    with Chart.load(CHART) as chart:
        rendered = chart.render(yaml.safe_load(values), name="ec-producer", namespace="vision")
    texts = [text for name, text in rendered.items() if name.endswith(".yaml")]
    manifests = [one for text in texts for one in yaml.safe_load_all(text) if one]
    names = {(one["kind"], one["metadata"]["name"]) for one in manifests}
    assert names & {("Deployment", "ec-producer"), ("StatefulSet", "ec-producer")}
    assert ("Service", "ec-producer-headless") in names
    for version in (OLDEST, NEWEST):
        assert [found for one in manifests if (found := trouble(one, version))] == []


def test_there_are_values_to_render() -> None:
    assert len(VALUES) >= 7
