"""Log lines: that they parse and say whom they are about, whatever is in them; and what is printed beside them."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer import log_relay, logs
from producer.logs import MAX_LINE_BYTES, ConsoleFormatter, JsonFormatter, LineHandler
from producer.wire.origin import Origin, work_for

KEY = "0123456789abcdef" * 4
ORIGIN = Origin("id-1", f"00-{'a' * 32}-{'b' * 16}-01")
HOSTILE = 'a\n{"level": "info"}\r\x1b[2J\x00\u2028\udcff"'


def record(message: str, *args: object, error: BaseException | None = None, **fields: Any) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("producer.x", logging.WARNING, "x.py", 1, message, args, info)
    made.fields = fields
    return made


def raised(text: str) -> Exception:
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        return error


# JSON


def test_a_json_line() -> None:
    with work_for(ORIGIN):
        line = JsonFormatter().format(record("%d of %s", 1, KEY, seconds=0.5, client=HOSTILE, time="mine"))
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "warning",
        "logger": "producer.x",
        "pid": os.getpid(),
        "message": "1 of 0123456789abcdef…",
        "request_id": "id-1",
        "trace_id": "a" * 32,
        "seconds": 0.5,
        "client": r'a\n{"level": "info"}\r\x1b[2J\x00\u2028\udcff"',
    }


def test_without_a_request_there_is_no_id() -> None:
    assert not {"request_id", "trace_id"} & json.loads(JsonFormatter().format(record("x"))).keys()


@given(text=st.text(max_size=5000), value=st.text(max_size=3000))
def test_any_text_gives_one_line_that_parses(text: str, value: str) -> None:
    line = JsonFormatter().format(record("%s", text, value=value, error=raised(text)))
    assert len(line) < MAX_LINE_BYTES
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["logger"] == "producer.x"


def test_of_a_long_traceback_both_ends_are_kept() -> None:
    found = json.loads(JsonFormatter().format(record("x", error=raised("y" * 100_000 + " the end"))))
    assert found["exception"].rstrip().endswith("the end")
    assert " … " in found["exception"]
    assert found["message"] == "x"


def test_a_record_that_cannot_be_made_a_line_fails_nobody() -> None:
    read, write = os.pipe()
    LineHandler(write).emit(record("%d", "no number"))
    LineHandler(write).emit(record("fine"))
    os.close(write)
    with os.fdopen(read) as lines:
        assert [json.loads(line)["message"] for line in lines] == ["fine"]
    LineHandler(write).emit(record("nobody reads it any more"))


# Console


def test_a_console_line() -> None:
    with work_for(ORIGIN):
        line = ConsoleFormatter().format(record("%s of %s", HOSTILE, KEY, seconds=0.5))
    assert line.endswith(
        r' WARNING producer.x: a\n{"level": "info"}\r\x1b[2J\x00\u2028\udcff" of 0123456789abcdef…'
        f" [request_id=id-1 trace_id={'a' * 32} seconds=0.5]"
    )
    assert line.isprintable()


def test_a_traceback_is_indented_so_that_it_can_fake_no_line() -> None:
    first, *rest = ConsoleFormatter().format(record("x", error=raised("a\n2026-01-01 INFO fake\x1b"))).splitlines()
    assert first.endswith("producer.x: x")
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert rest[-1] == r"  2026-01-01 INFO fake\x1b"


def test_where_an_error_came_from_without_its_text() -> None:
    assert logs.stack_of(raised("SECRET")).startswith("RuntimeError at test_logs.py:")
    assert "SECRET" not in logs.stack_of(raised("SECRET"))


# What is printed


def relayed(printed: bytes) -> list[dict[str, Any]]:
    read, write = os.pipe()
    out_read, out_write = os.pipe()
    os.write(write, printed)
    os.close(write)
    log_relay.relay(read, out_write)
    os.close(read)
    os.close(out_write)
    with os.fdopen(out_read, "rb") as lines:
        return [json.loads(line) for line in lines]


def test_lines_of_ours_pass_as_they_are() -> None:
    line = JsonFormatter().format(record("x", seconds=1))
    assert relayed(f"{line}\n".encode()) == [json.loads(line)]


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (b"plain\n", ["plain"]),
        (b"two\nlines, without an end", ["two", "lines, without an end"]),
        (b"\n\r\n  \n", []),
        (b"10%\r20%\r", ["10%", "20%"]),
        (b"\x1b[31mred\xff", ["\\x1b[31mred�"]),
        (b'{"time": "now"}\n', ['{"time": "now"}']),
        (b'{"time": 1, "level": 2, "logger": 3, "mess\n', ['{"time": 1, "level": 2, "logger": 3, "mess']),
        (f"key {KEY}".encode(), ["key 0123456789abcdef…"]),
    ],
)
def test_other_lines_become_json(printed: bytes, expected: list[str]) -> None:
    found = relayed(printed)
    assert [one["message"] for one in found] == expected
    assert all(one["logger"] == "printed" and one["level"] == "info" for one in found)


def test_a_line_without_an_end_takes_no_memory() -> None:
    lines = list(_lines_of(b"x" * (1 << 20)))
    assert len(lines) == 1
    assert len(lines[0]) <= log_relay._MOST + log_relay._READ_BYTES


def _lines_of(data: bytes) -> Iterator[bytes]:
    with open(os.memfd_create("printed"), "w+b") as file:
        file.write(data)
        file.seek(0)
        yield from log_relay._lines(file.fileno())


# A whole process

PROCESS = """
import ctypes, logging, os, subprocess, sys, threading, warnings
from producer import logs
logs.configure(logs.LogSettings(format=sys.argv[1], level=sys.argv[2]))
logging.getLogger("producer.x").debug("ours at debug")
logging.getLogger("other").debug("OTHERS AT DEBUG")
logging.getLogger("other").info("others at info")
logging.getLogger("vllm.x").info("vLLM at info")
warnings.warn("a warning")
print("printed on stdout", flush=True)
ctypes.CDLL(None).puts(b"by a C library"); ctypes.CDLL(None).fflush(None)
subprocess.run(["sh", "-c", "echo by a child; echo by a child, too >&2"])
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
raise KeyError("uncaught")
"""


def run(*arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-c", PROCESS, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.returncode, done.stdout.splitlines()


def test_all_that_a_process_says_is_json() -> None:
    status, lines = run("json", "debug")
    assert status == 1
    found = [json.loads(line) for line in lines]
    said = {one["message"]: one["level"] for one in found}
    assert said["ours at debug"] == "debug"
    assert "OTHERS AT DEBUG" not in said
    for text in ("others at info", "vLLM at info", "printed on stdout", "by a C library", "by a child"):
        assert said[text] == "info"
    assert "by a child, too" in said
    assert any("UserWarning: a warning" in text for text in said)
    uncaught = [one for one in found if one["level"] == "critical"]
    assert [one["message"] for one in uncaught] == ["uncaught ZeroDivisionError", "uncaught KeyError"]
    assert all("Traceback" in one["exception"] for one in uncaught)


@pytest.mark.parametrize(("level", "is_there"), [("debug", True), ("info", False), ("error", False)])
def test_levels_in_the_console(level: str, is_there: bool) -> None:
    _, lines = run("console", level)
    assert any(line.endswith("DEBUG producer.x: ours at debug") for line in lines) is is_there
    assert any(line.endswith("INFO other: others at info") for line in lines) is (level != "error")
    assert "printed on stdout" in lines
