"""Runs the checks one after another, and prints what they find as they find it, or as JSON."""

import json
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from typing import TextIO

from producer import __version__
from producer.config import ServeConfig
from producer.doctor import files, host, libraries, network
from producer.doctor.finding import Check, Deployment, Finding, Grade, warning, wrong
from producer.doctor.probe import PROBE_S

_LIBRARY_S = PROBE_S + 10.0
"""Above what a probe may take, so that its own answer is heard."""
CHECKS = (
    Check("driver", libraries.check_driver, 40.0),
    Check("torch", libraries.check_torch, _LIBRARY_S),
    Check("device", libraries.check_device, _LIBRARY_S),
    Check("vllm", libraries.check_vllm, _LIBRARY_S),
    Check("packages", libraries.check_packages, _LIBRARY_S),
    Check("nixl", network.check_nixl, 70.0),
    Check("mooncake", network.check_mooncake, 70.0),
    Check("rdma", network.check_rdma),
    Check("shared memory", host.check_shared_memory, 40.0),
    Check("/dev/shm", host.check_dev_shm),
    Check("hugepages", host.check_hugepages),
    Check("ports", network.check_ports),
    Check("memory", host.check_memory),
    Check("processors", host.check_processors),
    Check("open files", host.check_files),
    Check("tasks", host.check_tasks),
    Check("locked memory", host.check_locked_memory),
    Check("tracing", libraries.check_tracing, _LIBRARY_S),
    Check("tls", files.check_tls),
    Check("tokens", files.check_tokens),
    Check("publish files", files.check_published_files),
    Check("model", files.check_model, 200.0),
)
_SYMBOLS = {Grade.FINE: ("✓", "+", "32"), Grade.WARNING: ("!", "!", "33"), Grade.WRONG: ("✗", "x", "31")}
"""As it is, in ASCII, and its colour."""
_ORDER = (Grade.FINE, Grade.WARNING, Grade.WRONG)
_NAME_WIDTH = max(len(check.name) for check in CHECKS)
_MARGIN = 2 + 9 + _NAME_WIDTH + 2


def run(config: ServeConfig, model: str, *, as_json: bool) -> int:
    """Checks this machine for `config`; returns the exit status: 1 if something is wrong, else 0."""
    findings: list[tuple[str, Finding]] = []
    printer = None if as_json else Printer(sys.stdout)
    for name, finding in examine(CHECKS, Deployment(config=config, model=model)):
        findings.append((name, finding))
        if printer:
            printer.show(name, finding)
    worst = max((finding.grade for _, finding in findings), key=_ORDER.index)
    if printer:
        printer.summarize([finding.grade for _, finding in findings])
    else:
        lines = [{"check": name, "grade": one.grade.value, "what": one.what, "do": one.do} for name, one in findings]
        sys.stdout.write(json.dumps({"version": __version__, "grade": worst.value, "findings": lines}, indent=2) + "\n")
    return 1 if worst is Grade.WRONG else 0


def examine(checks: Sequence[Check], deployment: Deployment) -> Iterator[tuple[str, Finding]]:
    """Each check's findings under its name, in order; a check that fails or hangs has one that says so."""
    for check in checks:
        for finding in _examine(check, deployment):
            yield check.name, finding


def _examine(check: Check, deployment: Deployment) -> list[Finding]:
    found: list[Finding] = []

    def answer() -> None:
        try:
            found.extend(check.run(deployment))
        except Exception as error:  # a check that fails must not hide the others
            found.extend(warning(f"it cannot be checked: {type(error).__name__}: {error}", "report this as a bug"))

    thread = threading.Thread(target=answer, name=check.name, daemon=True)  # one that hangs does not hold the process
    thread.start()
    thread.join(check.timeout_s)
    if thread.is_alive():
        return wrong(f"no answer within {check.timeout_s:g} s", "look for a disk or device that hangs")
    return found


class Printer:
    """Lines for people: wrapped and in colour on a terminal, one line a finding elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._has_colour = self._is_terminal and "NO_COLOR" not in os.environ
        self._is_ascii = (out.encoding or "ascii").lower().replace("-", "") != "utf8"
        self._width = shutil.get_terminal_size().columns if self._is_terminal else 0

    def show(self, name: str, finding: Finding) -> None:
        plain, ascii_only, colour = _SYMBOLS[finding.grade]
        word = f"{ascii_only if self._is_ascii else plain} {finding.grade.value:<9}"
        if self._has_colour:
            word = f"\033[{colour}m{word}\033[0m"
        self._print(f"{name:<{_NAME_WIDTH}}  {finding.what}", word)
        if finding.do:
            arrow = "->" if self._is_ascii else "→"
            self._print(f"{'':<{_NAME_WIDTH}}  {arrow} {finding.do}", " " * 11)

    def summarize(self, grades: Sequence[Grade]) -> None:
        counts = {grade: sum(one is grade for one in grades) for grade in reversed(_ORDER)}
        said = ", ".join(f"{count} {_counted(grade, count)}" for grade, count in counts.items() if count)
        print(f"\n{said}", file=self._out, flush=True)

    def _print(self, text: str, before: str) -> None:
        room = self._width - _MARGIN
        if self._width and room > 20:
            start, rest = text[: _NAME_WIDTH + 2], text[_NAME_WIDTH + 2 :]
            lines = textwrap.wrap(rest, room, break_long_words=False, break_on_hyphens=False) or [""]
            text = f"\n{' ' * _MARGIN}".join([start + lines[0], *lines[1:]])
        encoded = f"{before}{text}"
        if self._is_ascii:
            encoded = encoded.encode("ascii", "replace").decode()
        print(encoded, file=self._out, flush=True)


def _counted(grade: Grade, count: int) -> str:
    return f"{grade.value}s" if grade is Grade.WARNING and count > 1 else grade.value
