"""What stands for the base image and for the container: an environment like vLLM's, and a process as in one."""

import base64
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from zipfile import ZipFile

from tests.image.dockerfile import ROOT, read_dockerfile

UID = 10001
IMAGE = ROOT / "image"
_OURS = ("ec_producer", "__editable__", "producer", "consumer_shim", "__pycache__")
_CONFINED = """#!/bin/sh
exec unshare --mount --propagation private -- /bin/sh -c '
set -e
{reveal}
mount --bind {cache} {cache}
cut -d " " -f 2 /proc/self/mounts | grep -Ev "^({cache}|/proc|/sys|/dev)(/|$)" | while read -r place; do
    mount -o remount,bind,ro "$place" 2>/dev/null || [ ! -d "$place" ]
done
cd {cache}
exec env {environment} setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs --bounding-set=-all \\
    --inh-caps=-all {command} "$@"' sh "$@"
"""


def make_base(home: Path, packages: Sequence[str] | None = None) -> Path:
    """An environment at `home` with links to this one's packages (`packages` of them, all by default) and none of
    ours. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        is_wanted = packages is None or entry.name.split("-")[0] in packages
        if is_wanted and not entry.name.startswith(_OURS) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return python


def make_wheel(
    folder: Path, name: str, version: str, *, files: Mapping[str, str] = {}, needs: Sequence[str] = ()
) -> Path:
    """A small, real wheel; `needs` are lines of its metadata such as `Requires-Dist: …`."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *needs, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def image_environment(cache: Path) -> dict[str, str]:
    """ENV of the producer's image, with `cache` where its one writable folder is."""
    stage = read_dockerfile().stages["producer"]
    (folder,) = stage.all("WORKDIR")
    return {name: value.replace(folder, str(cache), 1) for name, value in stage.pairs("ENV").items()}


def confine(command: Path, folder: Path) -> tuple[Path, Path]:
    """Puts into `folder` a command of the same name that runs as in the image: a user without privileges, its ENV, and
    every file system read-only but a folder of its own and /dev/shm. Returns the command's folder and that folder."""
    bin_dir, cache = folder / "bin", folder / "cache"
    bin_dir.mkdir()
    cache.mkdir()
    os.chown(cache, UID, UID)
    environment = " ".join(f"{name}={value}" for name, value in image_environment(cache).items())
    script = bin_dir / command.name
    script.write_text(
        _CONFINED.format(
            reveal="\n".join(_reveal(folder / "mounts")),
            cache=shlex.quote(str(cache)),
            environment=environment,
            uid=UID,
            command=command,
        )
    )
    script.chmod(0o755)
    return bin_dir, cache


def _reveal(mounts: Path) -> Iterator[str]:
    """Commands that let every user reach the interpreter and this repository, where a folder above is root's alone."""
    needed = {Path(sys.base_prefix), ROOT}
    above = {parent for place in needed for parent in place.parents if not parent.stat().st_mode & stat.S_IXOTH}
    for hidden in sorted(above)[:1]:
        inside = sorted(place for place in needed if place.is_relative_to(hidden))
        for number, place in enumerate(inside):
            yield f"mkdir -p {mounts}/{number}; mount --bind {place} {mounts}/{number}"
        yield f"mount -t tmpfs -o mode=755 hidden {hidden}"
        for number, place in enumerate(inside):
            yield f"mkdir -p {place}; mount --bind {mounts}/{number} {place}"


def can_confine() -> bool:
    """Whether this process may make a mount namespace and give up its user."""
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("setpriv"):
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
