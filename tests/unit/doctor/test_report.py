"""How checks are run and told: each for itself, in time, for people and for programs."""

import io
import json
import threading
import time
from typing import Any

import pytest

from producer.config import ServeConfig
from producer.doctor import report
from producer.doctor.finding import Check, Deployment, Finding, Grade, fine, size, warning, wrong
from tests.unit.doctor.conftest import deployment, grade_of

CONFIG = ServeConfig(model="none")
GOOD = Check("good", lambda _: fine("it works"))
POOR = Check("poor", lambda _: warning("it is slow", "make it faster"))
BAD = Check("bad", lambda _: wrong("it is broken", "mend it"))


def run(monkeypatch: pytest.MonkeyPatch, *checks: Check, as_json: bool = False) -> int:
    monkeypatch.setattr(report, "CHECKS", checks)
    return report.run(CONFIG, "", as_json=as_json)


@pytest.mark.parametrize(("checks", "status"), [((GOOD,), 0), ((GOOD, POOR), 0), ((BAD, POOR), 1), ((GOOD, BAD), 1)])
def test_only_what_is_wrong_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checks: tuple[Check, ...], status: int
) -> None:
    assert run(monkeypatch, *checks) == run(monkeypatch, *checks, as_json=True) == status


def test_lines_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, GOOD, POOR, BAD)
    assert capsys.readouterr().out == (
        "✓ fine     good           it works\n"
        "! warning  poor           it is slow\n"
        "                          → make it faster\n"
        "✗ wrong    bad            it is broken\n"
        "                          → mend it\n"
        "\n"
        "1 wrong, 1 warning, 1 fine\n"
    )


def test_warnings_are_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, POOR, POOR)
    assert capsys.readouterr().out.endswith("\n2 warnings\n")


def test_json_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, GOOD, BAD, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["grade"] == "wrong"
    assert told["findings"] == [
        {"check": "good", "grade": "fine", "what": "it works", "do": ""},
        {"check": "bad", "grade": "wrong", "what": "it is broken", "do": "mend it"},
    ]


def test_a_check_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def hang(_: Deployment) -> list[Finding]:
        never.wait()
        return []

    begun_s = time.monotonic()
    found = list(report.examine([Check("hung", hang, 0.2), GOOD], deployment()))
    never.set()
    assert time.monotonic() - begun_s < 30
    assert [(name, finding.grade) for name, finding in found] == [("hung", Grade.WRONG), ("good", Grade.FINE)]
    assert found[0][1].what == "no answer within 0.2 s"


def test_a_check_that_fails_hides_no_other() -> None:
    def fail(_: Deployment) -> list[Finding]:
        raise KeyError("no such thing")

    found = list(report.examine([Check("failed", fail), GOOD], deployment()))
    assert [finding.grade for _, finding in found] == [Grade.WARNING, Grade.FINE]
    assert "KeyError: 'no such thing'" in found[0][1].what


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def printed(out: Any, finding: Finding) -> str:
    report.Printer(out).show("name", finding)
    text: str = out.getvalue()
    return text


def test_a_terminal_has_colour_and_wrapped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = printed(Terminal(), Finding(Grade.WRONG, "long " * 20, "do " * 20))
    assert text.startswith("\033[31m✗ wrong    \033[0mname")
    plain = text.replace("\033[31m", "").replace("\033[0m", "")
    assert max(map(len, plain.splitlines())) <= 60
    assert plain.split().count("long") == plain.split().count("do") == 20
    assert {line[:26].strip() for line in plain.splitlines()[1:]} == {""}


def test_colour_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in printed(Terminal(), Finding(Grade.FINE, "it works"))


def test_where_there_is_no_utf_8_there_is_ascii() -> None:
    class Plain(io.StringIO):
        encoding = "ANSI_X3.4-1968"

    assert printed(Plain(), Finding(Grade.WRONG, "é", "mend it")).isascii()


def test_every_check_is_told_apart() -> None:
    names = [check.name for check in report.CHECKS]
    assert len(set(names)) == len(names)
    assert all(0 < check.timeout_s <= 300 for check in report.CHECKS)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1 << 20, "1.0 MiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_whoever_finds_fault_says_what_to_do() -> None:
    with pytest.raises(AssertionError):
        grade_of([Finding(Grade.WRONG, "it is broken")])
