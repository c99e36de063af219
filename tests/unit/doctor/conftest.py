"""What the tests of the doctor share: a deployment, and worlds in which something is missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from producer.config import ServeConfig
from producer.doctor.finding import Deployment, Finding
from producer.doctor.probe import ProbeError, Prober

Make = Callable[..., Deployment]


class Told(Prober):
    """Answers what a test says, for what no machine of ours has: a GPU. An exception is raised."""

    def __init__(self, **answers: Any) -> None:
        super().__init__()
        self._told = answers

    def ask(self, name: str, *arguments: Any, timeout_s: float = 1.0) -> Any:
        answer = self._told[name]
        if isinstance(answer, ProbeError):
            raise answer
        return answer


def deployment(*, model: str = "", prober: Prober | None = None, **settings: Any) -> Deployment:
    config = ServeConfig(model=model or "none", **{"preprocess_workers": 1, **settings})
    return Deployment(config=config, model=model, prober=prober or Prober())


def grade_of(findings: list[Finding]) -> str:
    """Of a check that has one finding, which says what to do where it is not fine."""
    (finding,) = findings
    assert bool(finding.do) is (finding.grade != "fine"), finding
    return finding.grade.value


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a module in the way of the real one, in processes that are started from here."""
    folder = tmp_path / "packages"
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def add(name: str, source: str) -> None:
        path = folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    return add
