"""The steps of the image, run here: tools, wheel, installation, software bill of materials, health."""

import hashlib
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from zipfile import ZipFile

import pytest

from tests.image.conftest import run, step
from tests.image.environment import make_base, make_wheel

PIP_ALONE = ("pip", "packaging")


def test_tools_are_installed_if_their_hashes_are_right(tmp_path: Path) -> None:
    tool = make_wheel(tmp_path / "links", "a-tool", "1.0", files={"a_tool.py": "answer = 42\n"})
    wanted = tmp_path / "requirements.txt"
    wanted.write_text(f"a-tool==1.0 --hash=sha256:{hashlib.sha256(tool.read_bytes()).hexdigest()}\n")
    done = step("tools.sh", wanted, tmp_path / "tools", PIP_FIND_LINKS=tool.parent)
    assert done.returncode == 0, done.stderr
    assert run(tmp_path / "tools/bin/python", "-c", "import a_tool; print(a_tool.answer)").stdout == "42\n"


@pytest.mark.parametrize(
    ("hashes", "said"), [(f" --hash=sha256:{'0' * 64}", "DO NOT MATCH THE HASHES"), ("", "Hashes are required")]
)
def test_a_tool_of_another_hash_or_none_is_refused(tmp_path: Path, hashes: str, said: str) -> None:
    tool = make_wheel(tmp_path / "links", "a-tool", "1.0")
    wanted = tmp_path / "requirements.txt"
    wanted.write_text(f"a-tool==1.0{hashes}\n")
    done = step("tools.sh", wanted, tmp_path / "tools", PIP_FIND_LINKS=tool.parent)
    assert done.returncode == 1
    assert said in done.stderr


def test_the_same_sources_give_the_same_wheel(wheel: Path, sources: Path, tmp_path: Path) -> None:
    done = step("build-wheel.sh", sources, tmp_path, PYTHON=sys.executable)
    assert Path(done.stdout.strip()).read_bytes() == wheel.read_bytes()
    with ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"producer", "consumer_shim", "ec_producer-0.1.0.dist-info"}


def test_a_folder_that_holds_a_wheel_already_is_refused(wheel: Path, sources: Path, tmp_path: Path) -> None:
    (tmp_path / "ec_producer-0.0.1-py3-none-any.whl").write_bytes(wheel.read_bytes())
    done = step("build-wheel.sh", sources, tmp_path, PYTHON=sys.executable)
    assert done.returncode == 1
    assert "it must hold no wheel before" in done.stderr


# install.py


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Pip, and a distribution named vllm."""
    python = make_base(tmp_path / "base", PIP_ALONE)
    vllm = make_wheel(tmp_path / "base-links", "vllm", "0.33.0", files={"vllm.py": ""})
    assert run(python, "-m", "pip", "install", vllm).returncode == 0
    return python


def add(python: Path, *wheels: Path) -> None:
    done = run(python, "-m", "pip", "install", *wheels)
    assert done.returncode == 0, done.stderr


def test_what_is_installed_runs_and_the_base_is_what_it_was(python: Path) -> None:
    assert "serve" in run(python.with_name("ec-producer"), "--help").stdout
    origin = run(python, "-c", "import producer, consumer_shim.middleware; print(producer.__file__)").stdout
    assert origin.startswith(str(python.parents[1]))


def test_a_second_installation_is_refused(python: Path, wheel: Path) -> None:
    done = step("install.py", wheel, PYTHON=python)
    assert done.returncode == 1
    assert "the base must have vllm and no ec-producer" in done.stderr


def test_a_base_without_vllm_is_refused(wheel: Path, tmp_path: Path) -> None:
    done = step("install.py", wheel, PYTHON=make_base(tmp_path / "base", PIP_ALONE))
    assert done.returncode == 1
    assert "it has neither" in done.stderr


def test_a_version_of_the_base_never_moves(base: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    add(base, make_wheel(tmp_path, "a-library", "1.0"))
    make_wheel(links, "a-library", "2.0")
    ours = make_wheel(tmp_path, "ec-producer", "0.1.0", needs=["Requires-Dist: a-library>=2"])
    done = step("install.py", ours, PYTHON=base, PIP_FIND_LINKS=links)
    assert done.returncode == 1
    assert "pip ended with 1" in done.stderr
    assert "a-library 1.0" in run(base, "-m", "pip", "list", "--format=freeze").stdout.replace("==", " ")


def test_a_file_of_the_base_is_not_written_over(base: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    add(base, make_wheel(tmp_path, "a-library", "1.0", files={"shared.py": "whose = 1\n"}))
    make_wheel(links, "another", "1.0", files={"shared.py": "whose = 2\n"})
    ours = make_wheel(tmp_path, "ec-producer", "0.1.0", needs=["Requires-Dist: another"])
    done = step("install.py", ours, PYTHON=base, PIP_FIND_LINKS=links)
    assert done.returncode == 1
    assert "another writes over files of a-library" in done.stderr


OURS = ["Provides-Extra: mooncake", 'Requires-Dist: mooncake-transfer-engine-non-cuda>=0.3.13; extra == "mooncake"']


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [("0.3.14", 0, "mooncake is there as mooncake-transfer-engine 0.3.14"), ("0.3.1", 1, "mooncake needs >=0.3.13")],
)
def test_a_library_that_the_base_has_by_another_name_is_used_if_it_fits(
    base: Path, tmp_path: Path, version: str, status: int, said: str
) -> None:
    add(base, make_wheel(tmp_path, "mooncake-transfer-engine", version, files={"mooncake/engine.py": ""}))
    make_wheel(tmp_path / "links", "mooncake-transfer-engine-non-cuda", "0.3.14", files={"mooncake/engine.py": "x\n"})
    ours = make_wheel(tmp_path, "ec-producer", "0.1.0", needs=OURS)
    done = step("install.py", ours, "mooncake", PYTHON=base, PIP_FIND_LINKS=tmp_path / "links")
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr
    assert "non-cuda" not in run(base, "-m", "pip", "list").stdout


# sbom.sh


def test_the_bill_of_materials_names_every_package(python: Path, tmp_path: Path) -> None:
    out = tmp_path / "sbom" / "sbom.cdx.json"
    tool = Path(sys.executable).with_name("cyclonedx-py")
    done = step("sbom.sh", out, PYTHON=python, CYCLONEDX=tool)
    assert done.returncode == 0, done.stderr
    sbom = json.loads(out.read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    versions = {component["name"]: component["version"] for component in sbom["components"]}
    assert versions["ec-producer"] == "0.1.0"
    assert {"vllm", "torch", "nixl-cu12", "grpcio"} <= versions.keys()
    assert "serialNumber" not in sbom  # the same packages give the same bytes


def test_a_bill_without_us_is_refused(base: Path, tmp_path: Path) -> None:
    tool = Path(sys.executable).with_name("cyclonedx-py")
    done = step("sbom.sh", tmp_path / "sbom.json", PYTHON=base, CYCLONEDX=tool)
    assert done.returncode == 1
    assert "lacks ec-producer" in done.stderr


# healthcheck.py; `test_confined.py` asks a real producer


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (302, 1), (500, 1)])
def test_only_200_is_healthy(url: str, status: int, code: int) -> None:
    done = step("healthcheck.py", f"{url}/{status}")
    assert (done.returncode, str(status) in done.stdout) == (code, bool(code))


def test_nobody_there_is_not_healthy() -> None:
    done = step("healthcheck.py", "http://127.0.0.1:9/healthz")
    assert done.returncode == 1
    assert "refused" in done.stdout
