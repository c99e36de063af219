"""Checks of certificates, tokens and folders, with real files, and of the model's folder before vLLM is asked."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from producer.doctor import files
from producer.doctor.probe import ProbeError
from tests.kit.certificates import Authority, encrypted
from tests.unit.doctor.conftest import Told, deployment, grade_of

LISTEN = "10.0.0.4:50051"


@pytest.fixture
def authority() -> Authority:
    return Authority()


def tls(folder: Path, authority: Authority, name: str = "encoder", **issue: Any) -> dict[str, str]:
    cert, key = authority.issue(name, **issue).write(folder, "tls")
    return {"tls_cert": cert, "tls_key": key, "advertise": "encoder:50051"}


# Certificates


def test_plaintext() -> None:
    assert grade_of(files.check_tls(deployment())) == "fine"
    assert grade_of(files.check_tls(deployment(listen=LISTEN))) == "warning"
    assert grade_of(files.check_tls(deployment(listen=LISTEN, token_file="tokens"))) == "fine"


def test_a_certificate_that_lasts(tmp_path: Path, authority: Authority) -> None:
    findings = files.check_tls(deployment(**tls(tmp_path, authority, days=90)))
    assert grade_of(findings) == "fine", findings
    assert "is for encoder, and lasts 90 days" in findings[0].what


def test_a_chain(tmp_path: Path, authority: Authority) -> None:
    settings = tls(tmp_path, authority, days=90)
    with open(settings["tls_cert"], "ab") as file:
        file.write(authority.cert)
    assert grade_of(files.check_tls(deployment(**settings))) == "fine"


def test_a_certificate_that_has_expired(tmp_path: Path, authority: Authority) -> None:
    findings = files.check_tls(deployment(**tls(tmp_path, authority, days=-1)))
    assert grade_of(findings) == "wrong"
    assert findings[0].what.endswith("tls.crt: it has expired")


def test_a_certificate_that_expires_soon(tmp_path: Path, authority: Authority) -> None:
    findings = files.check_tls(deployment(**tls(tmp_path, authority, days=3)))
    assert grade_of(findings) == "warning"
    assert "expires in 3.0 days" in findings[0].what


def test_a_certificate_of_another_name(tmp_path: Path, authority: Authority) -> None:
    findings = files.check_tls(deployment(**tls(tmp_path, authority, "other", days=90)))
    assert grade_of(findings) == "warning"
    assert "is not for encoder" in findings[0].what


def test_an_address_is_a_name(tmp_path: Path, authority: Authority) -> None:
    settings = tls(tmp_path, authority, "other", days=90)
    assert grade_of(files.check_tls(deployment(**{**settings, "advertise": "127.0.0.1:1"}))) == "fine"
    assert grade_of(files.check_tls(deployment(**{**settings, "advertise": "127.0.0.2:1"}))) == "warning"


@pytest.mark.parametrize("fault", ["another's key", "an encrypted key", "no PEM", "no file"])
def test_files_that_do_not_fit(tmp_path: Path, authority: Authority, fault: str) -> None:
    settings = tls(tmp_path, authority, days=90)
    pair = authority.issue("encoder")
    contents = {"another's key": pair.key, "an encrypted key": encrypted(pair), "no PEM": b"key"}
    key = Path(settings["tls_key"])
    key.unlink()
    if fault in contents:
        key.write_bytes(contents[fault])
    assert grade_of(files.check_tls(deployment(**settings))) == "wrong"


def test_the_clients_authority(tmp_path: Path, authority: Authority) -> None:
    """A test's authority lasts a day, so the check has something to say about it."""
    settings = tls(tmp_path, authority, days=90)
    findings = files.check_tls(deployment(**settings, tls_client_ca=authority.write(tmp_path, "ca")))
    assert grade_of(findings) == "warning"
    assert "expires in 1.0 days" in findings[0].what
    (tmp_path / "ca.crt").write_text("nothing")
    assert grade_of(files.check_tls(deployment(**settings, tls_client_ca=str(tmp_path / "ca.crt")))) == "wrong"


# Tokens


def test_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    settings = {"token_file": str(path)}
    assert grade_of(files.check_tokens(deployment())) == "fine"
    assert grade_of(files.check_tokens(deployment(**settings))) == "wrong"
    path.write_text("short\n")
    assert grade_of(files.check_tokens(deployment(**settings))) == "wrong"
    path.write_text("a-very-secret-token\n")
    findings = files.check_tokens(deployment(**settings))
    assert grade_of(findings) == "fine"
    assert "secret" not in findings[0].what
    assert grade_of(files.check_tokens(deployment(**settings, listen=LISTEN))) == "warning"


# Published files


def test_published_files(tmp_path: Path) -> None:
    assert grade_of(files.check_published_files(deployment())) == "fine"
    settings = {"publish_files": str(tmp_path / "new" / "folder"), "publish_files_bytes": 1 << 20}
    assert grade_of(files.check_published_files(deployment(**settings))) == "fine"
    assert (
        grade_of(files.check_published_files(deployment(**{**settings, "publish_files_bytes": 1 << 50}))) == "warning"
    )
    (tmp_path / "new").write_text("a file")
    assert grade_of(files.check_published_files(deployment(**settings))) == "wrong"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    assert grade_of(files.check_published_files(deployment(publish_files=str(tmp_path)))) == "wrong"


# The model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen2VLForConditionalGeneration"]}))
    (folder / "model.safetensors").touch()
    return folder


TAKEN = Told(model={"modalities": ["image", "video"], "dtype": "bfloat16"})


def test_no_model_is_no_fault() -> None:
    assert grade_of(files.check_model(deployment())) == "fine"


def test_a_model_that_vllm_takes(folder: Path) -> None:
    findings = files.check_model(deployment(model=str(folder), prober=TAKEN))
    assert grade_of(findings) == "fine"
    assert findings[0].what == "vLLM takes it, for image and video, in bfloat16"


def test_a_model_that_vllm_refuses(folder: Path) -> None:
    told = Told(model=ProbeError("model m: GPT2LMHeadModel encodes no media"))
    findings = files.check_model(deployment(model=str(folder), prober=told))
    assert grade_of(findings) == "wrong"
    assert findings[0].what == "vLLM does not take it: model m: GPT2LMHeadModel encodes no media"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "config.json: No such file or directory"),
        ("{", "config.json is not JSON"),
        ("[]", "config.json names no architecture"),
        ("{}", "config.json names no architecture"),
    ],
)
def test_a_folder_whose_configuration_is_broken(folder: Path, config: str | None, said: str) -> None:
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    findings = files.check_model(deployment(model=str(folder)))
    assert grade_of(findings) == "wrong"
    assert findings[0].what == f"{folder}: {said}"


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    findings = files.check_model(deployment(model=str(folder)))
    assert grade_of(findings) == "wrong"
    assert "it has no weights" in findings[0].what


def test_weights_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    findings = files.check_model(deployment(model=str(folder)))
    assert findings[0].what == f"{folder}: model.safetensors cannot be read by this user"


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere"])
def test_a_folder_that_is_not_there(name: str) -> None:
    findings = files.check_model(deployment(model=name))
    assert findings[0].what == f"{name}: there is no such folder"


def test_room_for_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    case = deployment(model="Some/Model", prober=TAKEN)

    def grades(free: int) -> list[str]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return [finding.grade.value for finding in files.check_model(case)]

    assert grades(1 << 40) == ["fine", "fine"]
    assert grades(1 << 30) == ["warning", "fine"]
    (tmp_path / "hub" / "models--Some--Model" / "snapshots").mkdir(parents=True)
    assert grades(1 << 30) == ["fine", "fine"]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert grades(1 << 40) == ["wrong", "fine"]
