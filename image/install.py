"""Installs the wheel beside vLLM, and fails where that would change what the base image has.

    python3 install.py WHEEL [EXTRA ...]

What is installed already is pip's constraint, so no version of it moves. An extra whose library is there under another
distribution's name (`mooncake-transfer-engine` for `mooncake`) is left out if its version fits, since two distributions
would own the same files. Afterwards every distribution and every file must be whose it was. Needs pip and `packaging`
only, and runs with the Python that vLLM runs with.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OWN = "ec-producer"
PROVIDERS = {
    "mooncake": ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
    "nixl": ("nixl-cu13", "nixl"),
}
"""By extra, the distributions other than its own that bring the library it is for."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class BaseChangedError(Exception):
    """Installing would change, or did change, what was there; the text names it."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What one environment holds: versions by distribution, and the distributions that claim each file."""

    versions: dict[str, str]
    owners: dict[str, set[str]]

    def changes(self, after: "Installed") -> list[str]:
        """One line for each distribution or file of this state that is another in `after`."""
        lines = [
            f"{name} {version} became {after.versions.get(name, 'nothing')}"
            for name, version in self.versions.items()
            if after.versions.get(name) != version
        ]
        taken = {
            (new, old)
            for file, owners in self.owners.items()
            for new in after.owners.get(file, set()) - owners
            for old in owners
        }
        return lines + [f"{new} writes over files of {old}" for new, old in sorted(taken)]


def installed() -> Installed:
    """The state of this interpreter's environment, as its metadata says now. Compiled files belong to nobody."""
    versions: dict[str, str] = {}
    owners: dict[str, set[str]] = {}
    for distribution in distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name in versions:  # hidden by one that comes earlier in sys.path
            continue
        versions[name] = distribution.version
        for file in distribution.files or ():
            if file.suffix != ".pyc":
                owners.setdefault(str(distribution.locate_file(file)), set()).add(name)
    return Installed(versions, owners)


def extras_to_install(extras: Sequence[str], wheel: Path, versions: dict[str, str]) -> list[str]:
    """`extras` less those that the base brings under another name.

    Raises:
        BaseChangedError: what it brings is too old or too new for the extra.
    """
    kept = []
    for extra in extras:
        provider = next((name for name in PROVIDERS.get(extra, ()) if name in versions), "")
        if provider:
            _check_provider(extra, provider, versions[provider], wheel)
            print(f"install: {extra} is there as {provider} {versions[provider]}")
        else:
            kept.append(extra)
    return kept


def _check_provider(extra: str, provider: str, version: str, wheel: Path) -> None:
    for requirement in _requirements(wheel):
        is_the_extras = requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
        if is_the_extras and not requirement.specifier.contains(version, prereleases=True):
            raise BaseChangedError(f"{provider} is {version}; {extra} needs {requirement.specifier}")


def _requirements(wheel: Path) -> list[Requirement]:
    with ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        archive.extract(metadata, folder)
        lines = Distribution.at(Path(folder, metadata).parent).requires or []
    return [Requirement(line) for line in lines]


def install(wheel: Path, extras: Sequence[str]) -> None:
    """Installs `wheel` with `extras`.

    Raises:
        BaseChangedError: the base has another ec-producer or lacks vLLM, or would not stay as it was.
    """
    before = installed()
    if "vllm" not in before.versions or OWN in before.versions:
        raise BaseChangedError(f"the base must have vllm and no {OWN}; it has {_among(before.versions)}")
    wanted = extras_to_install(extras, wheel, before.versions)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in before.versions.items())
        constraints.flush()
        target = f"{wheel}[{','.join(wanted)}]" if wanted else str(wheel)
        done = subprocess.run([*PIP, "install", "--no-cache-dir", "-c", constraints.name, target])
    if done.returncode:
        raise BaseChangedError(f"pip ended with {done.returncode}: see what it said about the base's packages")
    after = installed()
    if changes := before.changes(after):
        raise BaseChangedError("; ".join(changes))
    for name in sorted(after.versions.keys() - before.versions.keys()):
        print(f"install: {name} {after.versions[name]} is new")


def _among(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in ("vllm", OWN) if name in versions) or "neither"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 where the base would change, 2 without a wheel."""
    if not arguments or not Path(arguments[0]).is_file():
        print(f"install: {' '.join(arguments) or 'nothing'} given; expected WHEEL [EXTRA ...]", file=sys.stderr)
        return 2
    try:
        install(Path(arguments[0]).resolve(), arguments[1:])
    except BaseChangedError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
