"""The serving contract at a small scale, and that its table cannot pass over what is planted."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serving import __main__ as serving
from tests.serving import pulls
from tests.serving.service import Service, Usage
from tests.serving.table import MAX_NOTES, Record, failures, lines, verdict

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 400


@pytest.mark.e2e
def test_the_contract_holds() -> None:
    command = [sys.executable, "-m", "tests.serving", "--quick", "--scale", "0.1"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.stdout.splitlines()[-1] == "CONTRACT OK", run.stdout + run.stderr
    assert run.returncode == 0
    for case in (*serving.QUICK, "left behind"):
        assert f"\n{case} " in run.stdout, f"{case} is not in the table"


def clean(**planted: Any) -> Record:
    return replace(Record(name="load/x", tried=3, outcomes=Counter(OK=2, UNAVAILABLE=1)), **planted)


def test_a_clean_table_is_ok() -> None:
    assert verdict([clean()]) == "CONTRACT OK"
    assert not list(failures([clean()]))


@pytest.mark.parametrize(
    "planted",
    [
        {"hung": 1, "outcomes": Counter(OK=2)},
        {"wrong": 1},
        {"leaked": 1},
        {"outcomes": Counter(OK=2)},
        {"outcomes": Counter(OK=4)},
        {"tried": 0, "outcomes": Counter()},
    ],
    ids=["hung", "wrong", "leaked", "no outcome", "two outcomes", "nothing tried"],
)
def test_one_of_them_breaks_the_contract(planted: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    records = [clean(), clean(**planted), clean()]
    assert verdict(records) == "CONTRACT BROKEN"
    assert serving.report(records) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "CONTRACT BROKEN"


def test_no_case_is_no_contract() -> None:
    assert verdict([]) == "CONTRACT BROKEN"


def test_what_is_lost_shows_as_hung() -> None:
    (row,) = list(lines([clean(outcomes=Counter(OK=1))]))[1:]
    assert row.split()[1:5] == ["3", "2", "0", "0"]


def test_expectations_and_leaks_are_counted_and_said() -> None:
    record = clean()
    for number in range(MAX_NOTES + 1):
        record.expect(False, f"sentence {number}")
    record.expect(True, "not this one")
    record.leaks(0, "nor this")
    record.leaks(2, "two leases")
    assert (record.wrong, record.leaked, len(record.notes)) == (MAX_NOTES + 1, 2, MAX_NOTES)
    assert "load/x: wrong: sentence 0" in list(failures([record]))


def test_a_case_that_raises_is_wrong_and_one_that_never_ends_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(service: Service, record: Record, scale: float) -> None:
        raise OSError("planted")

    def never_ends(service: Service, record: Record, scale: float) -> None:
        while True:
            os.getpid()

    monkeypatch.setattr(serving, "CASE_S", 0.05)
    service: Any = None
    assert serving.run("pulls/raises", raises, service, 1.0).wrong == 1
    assert serving.run("pulls/never_ends", never_ends, service, 1.0).hung == 1


@pytest.mark.parametrize(
    ("end", "counts"),
    [
        (("READY", "a", ""), (0, 0)),
        (("READY", "b", ""), (0, 1)),
        (("503", "", "gone"), (0, 0)),
        (("503", "", ""), (0, 1)),
        (("500", "", "what?"), (0, 1)),
        (("HUNG", "", ""), (1, 0)),
    ],
)
def test_pulls_are_judged(end: tuple[str, str, str], counts: tuple[int, int]) -> None:
    record = Record(name="pulls/x")
    pulls.judge(record, "a", *end)
    assert (record.tried, record.lost) == (1, 0)
    assert (record.hung, record.wrong) == counts


@pytest.mark.parametrize("grown", [{"fds": 50}, {"threads": 50}, {"rss_bytes": 1 << 30}])
def test_growth_is_a_leak(grown: dict[str, int]) -> None:
    middle, record = Usage(fds=10, threads=10, rss_bytes=1 << 20), Record(name="load/x")
    middle.grown(middle, record, "the service")
    assert not record.leaked
    middle.grown(replace(middle, **grown), record, "the service")
    assert record.leaked
