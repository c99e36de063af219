"""Checks of files: the model, certificates and tokens, and where files are published."""

import json
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

from producer.config import ServeConfig, split_address
from producer.doctor.certificates import CertificateError, examine, shortest_days_left
from producer.doctor.finding import Deployment, Finding, fine, size, warning, wrong
from producer.doctor.probe import ProbeError
from producer.wire.credential_files import CredentialFileError, is_loopback, tls_files, token_file

_SOON_DAYS = 14.0
_MODEL_S = 180.0
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_LITTLE_DISK_BYTES = 20 << 30
"""Fewer may not hold a model of the hub."""
_ANY_ADDRESS = ("0.0.0.0", "::")


def check_model(deployment: Deployment) -> list[Finding]:
    """Its folder, then what vLLM makes of its configuration; no weights are read."""
    model = deployment.model
    if not model:
        return fine("none was named, so none was looked at")
    folder = Path(model)
    is_folder = model.startswith(("/", ".")) or folder.is_dir()
    if is_folder and (why := _fault_of(folder)):
        return wrong(f"{model}: {why}", "name a folder with config.json and the weights beside it")
    findings = [] if is_folder else _check_hub_disk(model)
    config = deployment.config
    settings: dict[str, Any] = {
        "model": model,
        **{
            name: getattr(config, name)
            for name in (
                *("dtype", "mm_encoder_attn_backend", "revision", "trust_remote_code", "mm_processor_kwargs"),
                *("media_io_kwargs", "fidelity", "compile_mm_encoder"),
            )
        },
    }
    try:
        found = deployment.prober.ask("model", settings, timeout_s=_MODEL_S)
    except ProbeError as error:
        do = "see which models vLLM has; a hub model also needs the network, or HF_HUB_OFFLINE=1 and a full cache"
        return [*findings, *wrong(f"vLLM does not take it: {error}", do)]
    return [*findings, *fine(f"vLLM takes it, for {' and '.join(found['modalities'])}, in {found['dtype']}")]


def _fault_of(folder: Path) -> str:
    """What a folder lacks to be a model; "" if nothing."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except OSError as error:
        return f"config.json: {error.strerror}"
    except ValueError:
        return "config.json is not JSON"
    if not isinstance(config, dict) or not config.get("architectures"):
        return "config.json names no architecture"
    weights = [path for pattern in _WEIGHTS for path in folder.glob(pattern)]
    if not weights:
        return f"it has no weights ({', '.join(_WEIGHTS)})"
    unreadable = [path.name for path in weights if not os.access(path, os.R_OK)]
    return f"{', '.join(unreadable)} cannot be read by this user" if unreadable else ""


def _check_hub_disk(model: str) -> list[Finding]:
    """Room for what will be downloaded, where it is not there already."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    if (hub / f"models--{model.replace('/', '--')}" / "snapshots").is_dir():
        return fine(f"{model} is in the cache, {hub}")
    there = next(folder for folder in (hub, *hub.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return wrong(
            f"{model} is to be downloaded to {hub}, which cannot be written", "set HF_HOME to a folder that can"
        )
    if free < _LITTLE_DISK_BYTES:
        return warning(f"{model} is to be downloaded to {hub}, where {size(free)} are free", "set HF_HOME elsewhere")
    return fine(f"{model} is to be downloaded to {hub}, where {size(free)} are free")


def check_tls(deployment: Deployment) -> list[Finding]:
    config = deployment.config
    if not config.tls_cert:
        return _check_plaintext(config)
    try:
        tls_files(("tls_cert", config.tls_cert), ("tls_key", config.tls_key), ("tls_client_ca", config.tls_client_ca))
        found = examine(config.tls_cert, config.tls_key, _name(config))
        ca_days = shortest_days_left(config.tls_client_ca) if config.tls_client_ca else float("inf")
    except CertificateError as error:
        return wrong(f"--tls-cert {config.tls_cert}: {error}", "have it issued anew")
    except (OSError, ssl.SSLError) as error:  # of ours, CredentialFileError
        return wrong(f"TLS: {error}", "give readable PEM files of a chain and its own key, without a password")
    if ca_days <= 0:
        return wrong(f"--tls-client-ca {config.tls_client_ca}: an authority has expired", "give its successor")
    days = min(found.days_left, ca_days)
    if days < _SOON_DAYS:
        return warning(f"what TLS needs expires in {days:.1f} days", "renew it; changed files are noticed")
    if not found.has_name:
        do = "have it issued for that name, or give consumers tls_server_name"
        return warning(f"the certificate is not for {_name(config)}, by which consumers connect", do)
    return fine(f"the certificate fits its key, is for {_name(config)}, and lasts {days:.0f} days")


def _check_plaintext(config: ServeConfig) -> list[Finding]:
    host = split_address("listen", config.listen)[0]
    if is_loopback(host) or config.token_file:
        return fine("off")
    do = "give --tls-cert, --tls-key and --tls-client-ca, or --token-file, or let only consumers reach it"
    return warning(f"off, and whoever reaches {config.listen} may use the service", do)


def _name(config: ServeConfig) -> str:
    """By which consumers connect, as far as settings tell."""
    host, _ = split_address("advertise", config.advertise or config.listen)
    return "localhost" if host in _ANY_ADDRESS else host


def check_tokens(deployment: Deployment) -> list[Finding]:
    path = deployment.config.token_file
    if not path:
        return fine("no tokens are asked for")
    try:
        count = len(token_file(path).current())
    except CredentialFileError as error:
        return wrong(str(error), "give a readable file of tokens, one a line")
    if not deployment.config.tls_cert and not is_loopback(split_address("listen", deployment.config.listen)[0]):
        return warning(f"{count} tokens, which travel in the clear", "give --tls-cert and --tls-key")
    return fine(f"{count} tokens")


def check_published_files(deployment: Deployment) -> list[Finding]:
    config = deployment.config
    if not config.publish_files:
        return fine("no files are published")
    folder = Path(config.publish_files)
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return wrong(f"--publish-files {folder}: {there} cannot be written", "give a folder that this user may write")
    free = shutil.disk_usage(there).free
    what = f"{folder} has {size(free)} free; files may take {size(config.publish_files_bytes)}"
    if free < config.publish_files_bytes:
        return warning(what, "lower --publish-files-bytes, or give a larger disk")
    return fine(what)
