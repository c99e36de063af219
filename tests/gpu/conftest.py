"""What a GPU host needs that has the sources and no installed `ec-producer`, and what the tests there find out."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.report import report, reported

REPOSITORY = Path(__file__).parents[2]
COMMANDS = {"vllm": "vllm.entrypoints.cli.main", "ec-producer": "producer.cli"}
SCRIPT = """#!{python}
import sys
from {module} import main
if __name__ == "__main__":
    sys.exit(main())
"""
ENTRY_POINTS = """[vllm.general_plugins]
ec_producer = consumer_shim.plugin:register
"""
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True, slots=True)
class Host:
    """`vllm` and `ec-producer` for this interpreter, and the plugin, whether or not they are installed."""

    bin_dir: Path

    @classmethod
    def at(cls, folder: Path) -> "Host":
        """Writes the commands and the plugin's entry point into `folder`, which is empty."""
        for name, module in COMMANDS.items():
            script = folder / name
            script.write_text(SCRIPT.format(python=sys.executable, module=module))
            script.chmod(0o755)
        info = folder / "ec_producer-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ec-producer\nVersion: 0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        return cls(folder)

    @property
    def env(self) -> dict[str, str]:
        """For the processes of those commands; what only a GPU knows is left out without one."""
        path = [str(self.bin_dir), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(path)} | (ENVIRONMENT if torch.cuda.is_available() else {})


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host.at(tmp_path_factory.mktemp("bin"))


class EndToEnd:
    """The figures of `end_to_end`, by family, mode and transport, and their sums.

    What an earlier run left in the same folder of reports stays, where this run does not do it again.
    """

    NAME = "end_to_end"
    SUMS = ("cases", "tokens_equal", "identical")

    def __init__(self) -> None:
        self._families: dict[str, dict[str, dict[str, Any]]] = reported(self.NAME).get("families", {})

    def add(self, family: str, mode: str, transport: str, figures: dict[str, Any]) -> None:
        """Reports at once, since what comes next may take too long."""
        self._families.setdefault(family, {}).setdefault(mode, {})[transport] = figures
        each = [one for modes in self._families.values() for found in modes.values() for one in found.values()]
        report(self.NAME, {name: sum(one[name] for one in each) for name in self.SUMS} | {"families": self._families})


@pytest.fixture(scope="session")
def end_to_end() -> EndToEnd:
    return EndToEnd()
