"""The wheel as a user gets it, and an environment that holds it and nothing of the source tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("producer", "consumer_shim")

_VLLM_COMMAND = """#!{python}
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":  # its processes import this file again
    sys.exit(main())
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment whose `bin` has `python`, `ec-producer` and `vllm`.

    Only the wheel is installed in it; everything else comes from the environment that runs the tests. Start what you
    start from it with `environ`, and in a directory other than the source tree.
    """

    home: Path

    @property
    def bin(self) -> Path:
        return self.home / "bin"

    @property
    def environ(self) -> dict[str, str]:
        """This process's variables, less those that would bring the source tree back."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return kept | {"VIRTUAL_ENV": str(self.home), "PATH": f"{self.bin}{os.pathsep}{kept['PATH']}"}

    def run(self, command: str, *arguments: str) -> str:
        """Runs one of `bin`'s commands in `home`, and returns what it printed."""
        return _run(str(self.bin / command), *arguments, cwd=self.home, env=self.environ)


def build_wheel(directory: Path) -> Path:
    """Builds the wheel under `directory`, from a copy: a build leaves files beside its sources."""
    sources = directory / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
    _run(*build, "--outdir", str(directory), str(sources), cwd=directory)
    (wheel,) = directory.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, home: Path) -> Environment:
    """Makes an environment at `home` with `wheel` in it. Its path must be short enough for a shebang line."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(home))
    environment = Environment(home)
    python = str(environment.bin / "python")
    install = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--ignore-installed",
    )
    _run(*install, str(wheel))
    site = environment.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Adds that directory's packages after this one's, and reads none of its .pth files: so not the editable install.
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    vllm = environment.bin / "vllm"
    vllm.write_text(_VLLM_COMMAND.format(python=python))
    vllm.chmod(0o755)
    return environment


def _run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
