"""The service's log: one line an event on stderr, for people (console) or for programs (JSON).

A line about a request has its id and its trace's. Whatever a line is about, control characters cannot break it and a
content key is cut to 16 digits. JSON lines have at most 4096 bytes, so that processes that share a pipe write them
whole; what libraries and child processes print beside it comes out as such lines, too, by `producer.log_relay`.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from producer.wire import origin as origins
from producer.wire.log_text import clean, shorten_keys

FORMATS = ("console", "json")
LEVELS = ("debug", "info", "warning", "error")
MAX_LINE_BYTES = 4096

_OURS = ("producer", "consumer_shim")
_STDOUT, _STDERR = 1, 2
_MAX_TRACE = 16_000
_RESERVED = ("time", "level", "logger", "message")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """`format` is one of `FORMATS`. `level` is one of `LEVELS` and holds for our own lines, for others' from info."""

    format: str = "console"
    level: str = "info"


_settings: LogSettings | None = None


def settings() -> LogSettings | None:
    """What this process was configured with, if it was; child processes are to have the same."""
    return _settings


def is_json() -> bool:
    """Whether this process logs JSON."""
    return _settings is not None and _settings.format == "json"


def configure(chosen: LogSettings) -> None:
    """For the service's own process, once, before anything is logged or started."""
    global _settings
    _settings = chosen
    others = max(logging.INFO, _number(chosen.level))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", logging.getLevelName(others))
    if chosen.format == "json":
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # vLLM's lines come to our handler
        os.environ.setdefault("TQDM_DISABLE", "1")
        _set_handler(LineHandler(_divert()))
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    else:
        console = logging.StreamHandler(sys.stderr)
        console.setFormatter(ConsoleFormatter())
        _set_handler(console)
    _set_levels(chosen)


def configure_child(chosen: LogSettings) -> None:
    """For a process that the service starts, after its imports: vLLM sets its own logger up at import."""
    global _settings
    _settings = chosen
    handler = LineHandler(_STDERR) if chosen.format == "json" else logging.StreamHandler(sys.stderr)
    if chosen.format == "console":
        handler.setFormatter(ConsoleFormatter())
    _set_handler(handler)
    _set_levels(chosen)


class ConsoleFormatter(logging.Formatter):
    """Time, level, logger, message, and at the end what else is known of it; a traceback below, indented."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        known = {**_ids(), **getattr(record, "fields", {})}
        said = " ".join(f"{name}={clean(str(value), most=200)}" for name, value in known.items())
        line = f"{time} {record.levelname} {record.name}: {clean(record.getMessage())}{said and f' [{said}]'}"
        trace = _trace(record)
        return line + "".join(f"\n  {clean(one)}" for one in trace.splitlines())


class JsonFormatter(logging.Formatter):
    """An object a line: time (UTC), level, logger, pid, message, request_id and trace_id if known, and more fields."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": clean(record.getMessage()),
            **_ids(),
            **{name: _plain(value) for name, value in getattr(record, "fields", {}).items() if name not in _RESERVED},
        }
        trace = _trace(record)
        if trace:
            content["exception"] = shorten_keys(trace)
        return line_of(content)


class LineHandler(logging.Handler):
    """Writes JSON lines to a file descriptor, each with one call; what cannot be written is lost."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            left = memoryview((self.format(record) + "\n").encode())
            while left:
                left = left[os.write(self._fd, left) :]
        except Exception:  # a line that cannot be made or written must not fail what it is about
            return


def line_of(content: dict[str, Any]) -> str:
    """`content` as JSON in ASCII, of at most `MAX_LINE_BYTES` with its line end: long texts lose their middle."""
    line = json.dumps(content)
    while len(line) >= MAX_LINE_BYTES:
        name = max(content, key=lambda name: len(json.dumps(content[name])))
        text = str(content[name])
        kept = len(text) * 2 // 5
        content = {**content, name: f"{text[:kept]} … {text[len(text) - kept :]}" if kept > 4 else ""}
        line = json.dumps(content)
    return line


def utc(seconds: float) -> str:
    """A time as lines have it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def stack_of(error: BaseException) -> str:
    """Where `error` was raised, and of which kind: without its text, which may be of somebody's media."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = " < ".join(f"{os.path.basename(one.filename)}:{one.lineno} {one.name}" for one in reversed(frames))
    return f"{type(error).__name__} at {places or 'an unknown place'}"


def _set_handler(handler: logging.Handler) -> None:
    logging.basicConfig(handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.raiseExceptions = False


def _set_levels(chosen: LogSettings) -> None:
    level = _number(chosen.level)
    logging.getLogger().setLevel(max(logging.INFO, level))  # others' debug lines may hold anything
    for name in _OURS:
        logging.getLogger(name).setLevel(level)


def _number(level: str) -> int:
    return int(getattr(logging, level.upper()))


def _divert() -> int:
    """Has all that is printed go through a relay; returns a descriptor of the log itself."""
    log = os.dup(_STDERR)
    printed, pipe = os.pipe()
    command = [sys.executable, "-m", "producer.log_relay"]
    subprocess.Popen(command, stdin=printed, stdout=log, stderr=log)
    os.close(printed)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(pipe, _STDOUT)
    os.dup2(pipe, _STDERR)
    os.close(pipe)
    return log


def _log_uncaught(kind: Any, error: Any, trace: Any) -> None:
    logging.getLogger("producer").critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))


def _ids() -> dict[str, str]:
    origin = origins.current()
    found = {"request_id": origin.request_id, "trace_id": origin.trace_id}
    return {name: value for name, value in found.items() if value}


def _trace(record: logging.LogRecord) -> str:
    if record.exc_info and record.exc_info[0] is not None:
        return "".join(traceback.format_exception(*record.exc_info))[-_MAX_TRACE:]
    return record.stack_info or ""


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else clean(str(value), most=400)
