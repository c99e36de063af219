"""The Dockerfile, which cannot be built here: hadolint, and rules of our own. Its scripts run in `test_steps.py`."""

import ast
import json
import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from producer import __version__
from producer.config import ServeConfig, split_address
from tests.image.dockerfile import ROOT, read_dockerfile

HADOLINT = Path(sys.executable).with_name("hadolint")
FILE = read_dockerfile()
IMAGES = ("producer", "consumer")
SCRIPTS = {path.name for path in (ROOT / "image").iterdir() if path.suffix in (".sh", ".py")}


def hadolint(path: Path) -> list[str]:
    done = subprocess.run([HADOLINT, "--no-color", "--format", "json", str(path)], capture_output=True, text=True)
    return [finding["code"] for finding in json.loads(done.stdout)]


def test_hadolint_finds_nothing() -> None:
    assert hadolint(ROOT / "Dockerfile") == []


def test_hadolint_does_look(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian:latest\nADD https://host.invalid/file /file\nRUN cd /tmp\n")
    assert {"DL3007", "DL3003"} <= set(hadolint(bad))


def test_the_base_is_pinned_by_a_digest_that_the_builder_gives() -> None:
    outside = {stage.base for stage in FILE.stages.values() if stage.base not in FILE.stages}
    (base,) = outside
    match = re.fullmatch(r"\$\{VLLM_IMAGE\}:\$\{VLLM_TAG\}@\$\{VLLM_DIGEST:\?([\w./-]+)\}", base)
    assert match, base
    assert FILE.arguments["VLLM_DIGEST"] is None
    assert re.fullmatch(r"v\d+\.\d+\.\d+", FILE.arguments["VLLM_TAG"] or "")
    named = re.findall(r"docs/\w+\.md", match[1])
    assert named
    assert all("VLLM_DIGEST" in (ROOT / name).read_text() for name in named)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_as_a_number_that_is_not_root(name: str) -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", FILE.stages[name].all("USER")[-1])


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_says_what_it_is_how_it_is_and_how_it_stops(name: str) -> None:
    stage = FILE.stages[name]
    labels = {label.removeprefix("org.opencontainers.image.") for label in stage.pairs("LABEL")}
    assert {"title", "description", "version", "revision", "licenses", "base.name", "base.digest"} <= labels
    assert stage.all("STOPSIGNAL") == ["SIGTERM"]
    assert all(flag in stage.all("HEALTHCHECK")[-1] for flag in ("--interval", "--timeout", "--start-period"))
    for keyword in ("ENTRYPOINT", "CMD"):
        assert json.loads(stage.all(keyword)[-1])  # without a shell, so that signals arrive
    assert "--from=" + name + "-sbom /sbom /opt/ec-producer/sbom" in stage.all("COPY")
    assert FILE.stages[f"{name}-sbom"].base == stage.base


def test_what_is_built_without_a_target_is_the_producer() -> None:
    assert list(FILE.stages)[-1] == "producer"


def test_ports_are_the_settings_defaults() -> None:
    fields = ServeConfig.__dataclass_fields__
    ports = [split_address(name, fields[name].default)[1] for name in ("listen", "metrics_listen")]
    assert FILE.stages["producer"].all("EXPOSE") == [" ".join(map(str, ports))]
    default = re.search(r'DEFAULT = "(.*)"', (ROOT / "image" / "healthcheck.py").read_text())
    assert default
    assert f":{ports[1]}/" in default[1]


def test_every_folder_that_is_written_is_under_the_one_that_may_be() -> None:
    (cache,) = FILE.stages["producer"].all("WORKDIR")
    environment = FILE.stages["producer"].pairs("ENV")
    places = {name: value for name, value in environment.items() if value.startswith("/")}
    assert {"HOME", "TMPDIR", "HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"} <= places.keys()
    assert {name for name, value in places.items() if not Path(value).is_relative_to(cache)} == set()
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"


def test_the_chart_runs_the_image_as_it_is_meant() -> None:
    stage = FILE.stages["producer"]
    chart = ROOT / "helm" / "ec-producer"
    security = yaml.safe_load((chart / "values.yaml").read_text())["podSecurityContext"]
    assert stage.all("USER")[-1] == f"{security['runAsUser']}:{security['runAsGroup']}"
    mounts = "".join(path.read_text() for path in (chart / "templates").glob("*.tpl"))
    assert f"mountPath: {stage.all('WORKDIR')[0]}}}" in mounts


def test_nothing_is_taken_from_addresses_and_nothing_secret_is_kept() -> None:
    for stage in FILE.stages.values():
        assert stage.all("ADD") == []
        assert [run for run in stage.all("RUN") if re.search(r"https?:|curl |wget ", run)] == []
        names = [words.partition("=")[0] for words in stage.all("ARG")] + list(stage.pairs("ENV"))
        assert [name for name in names if re.search("TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL", name)] == []
    assert [name for name in FILE.arguments if re.search("TOKEN|SECRET|PASSWORD|KEY", name)] == []


def copied() -> set[str]:
    """Top-level names of the source tree that COPY takes."""
    lines = [words for stage in FILE.stages.values() for found, words in stage.instructions if found == "COPY"]
    return {source for words in lines if "--from=" not in words for source in words.split()[:-1]}


def test_every_source_exists_and_the_context_holds_no_others() -> None:
    assert {source for source in copied() if not (ROOT / source).exists()} == set()
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert patterns[0] == "*"
    assert {line[1:] for line in patterns if line[0] == "!"} == {source.split("/")[0] for source in copied()}


def test_what_comes_from_a_stage_comes_from_an_earlier_one() -> None:
    seen: set[str] = set()
    for name, stage in FILE.stages.items():
        words = " ".join(stage.all("COPY") + stage.all("RUN"))
        assert set(re.findall(r"(?:--from=|,from=)([\w-]+)", words)) <= seen
        seen.add(name)


def test_every_script_is_a_step_and_every_step_is_run_by_a_test() -> None:
    used = " ".join(words for stage in FILE.stages.values() for found, words in stage.instructions if found != "COPY")
    tree = ast.parse((ROOT / "tests" / "image" / "test_steps.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    run = {
        str(call.args[0].value) for call in calls if call.func.id == "step" and isinstance(call.args[0], ast.Constant)
    }
    assert set(re.findall(r"/([\w-]+\.(?:sh|py))", used)) == SCRIPTS == run


def test_extras_and_version_are_the_projects() -> None:
    (run,) = (words for words in FILE.stages["producer"].all("RUN") if "install.py" in words)
    extras = run.partition("*.whl ")[2].split()
    assert extras == ["producer", "nixl", "mooncake", "tracing"]
    assert set(extras) <= set(metadata("ec-producer").get_all("Provides-Extra") or ())
    assert f"VERSION={__version__}" in FILE.stages["producer"].all("ARG")


def test_tools_are_those_of_the_tests_with_hashes() -> None:
    text = (ROOT / "image" / "requirements.txt").read_text()
    blocks = [block for block in re.split(r"\n(?=\S)", text) if not block.startswith("#")]
    assert all(block.count("--hash=sha256:") >= 1 for block in blocks)
    tools = {canonicalize_name(one.name): one.specifier for one in (Requirement(b.split()[0]) for b in blocks)}
    assert {"build", "cyclonedx-bom", "setuptools"} <= tools.keys()
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    tested = {canonicalize_name(one.name): one.specifier for one in map(Requirement, lines)}
    assert {name: tested.get(name) for name in tools if name != "setuptools"} == {
        name: specifier for name, specifier in tools.items() if name != "setuptools"
    }
