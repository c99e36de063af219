"""`make chart`: the Helm chart over all values in ci/, by Helm's own engine and the real service.

    python -m tests.chart [--only CASE] [--no-service]

For each case: lint, render, check every manifest, and start `ec-producer serve` with the pod's command line on loopback
(with a tiny checkpoint), probe it as the kubelet would, and end it. The last line is `CHART OK` with exit status 0, or
`CHART BROKEN` with 1. Half a minute a case on two idle cores.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import helm_python as helm

from tests.chart.generate import CHART, generated
from tests.chart.invariants import findings, restricted
from tests.chart.machine import Container, end, on_this_machine
from tests.chart.rendering import CASES, Manifest, Values, expand, name_of, of_kind, pods, render, values_of
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.leftovers import leftovers, snapshot
from tests.kit.servers import HOST
from tests.kit.stack import Stack

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
INTERRUPTED = 130


@dataclass(slots=True)
class Row:
    """What was found of one case; a cell is "ok", or what was seen, or "-" where nothing was tried."""

    case: str
    cells: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def tell(self, cell: str, found: Iterable[str], good: str = "ok") -> None:
        """The cell's findings; none is good."""
        said = [f"{self.case}: {cell}: {one}" for one in found]
        self.broken += said
        self.cells[cell] = "BROKEN" if said else good


CELLS = ("lint", "manifests", "security", "vLLM's flags", "start", "probes", "ports", "end", "replaced here")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chart", description="The Helm chart.")
    parser.add_argument("--only", choices=[name_of(case) for case in CASES], help="one case")
    parser.add_argument("--no-service", action="store_true", help="do not start the real service")
    options = parser.parse_args(arguments)
    names = [name for name in map(name_of, CASES) if options.only in (None, name)]
    before = snapshot()
    rows = []
    with Stack():
        for name in names:
            began_s = time.monotonic()
            rows.append(check(name, with_service=not options.no_service))
            print(f"{time.monotonic() - began_s:6.1f} s  {name}", flush=True)
    return report(rows, [*out_of_date(), *(f"left behind: {one}" for one in leftovers(before))])


def out_of_date() -> Iterator[str]:
    """Generated files that are not what their sources say."""
    for path, text in generated().items():
        if path.read_text() != text:
            yield f"{path.name} is out of date; python -m tests.chart.generate"


def check(name: str, *, with_service: bool) -> Row:
    """One case to its end."""
    row, values = Row(name), values_of(name)
    row.tell("lint", lint(values))
    manifests = render(values)
    row.tell("manifests", findings(manifests), str(len(manifests)))
    open_doors: Iterable[str] = [] if values.get("rdma", {}).get("ipcLock") else _not_restricted(manifests)
    row.tell("security", open_doors, "by choice" if values.get("rdma", {}).get("ipcLock") else "restricted")
    if values.get("consumer", {}).get("enabled"):
        row.tell("vLLM's flags", consumer_flags(manifests))
    if with_service:
        with tempfile.TemporaryDirectory(prefix="ec-chart-") as folder:
            serve(row, manifests, Path(folder))
    return row


def lint(values: Values) -> Iterator[str]:
    """What `helm lint --strict` says; a chart without a picture is fine."""
    report = helm.lint(CHART, values, strict=True)
    yield from (one["error"] for one in report["messages"] if one["error"] != "icon is recommended")
    yield from report["errors"]


def _not_restricted(manifests: list[Manifest]) -> Iterator[str]:
    for owner, pod in pods(manifests):
        yield from (f"{owner}: {one}" for one in restricted(pod))


def consumer_flags(manifests: list[Manifest]) -> Iterator[str]:
    """What vLLM's own parser says of the consumer's command line, which is not started: it takes gigabytes."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    template = of_kind(manifests, "Deployment", "-consumer")["spec"]["template"]
    words = [expand(word, {"POD_IP": HOST}) for word in template["spec"]["containers"][0]["args"]]
    try:
        options = make_arg_parser(FlexibleArgumentParser()).parse_args(words[1:])
    except SystemExit:
        yield "vLLM does not take them; what it says is above"
        return
    if not options.ec_transfer_config.ec_connector_extra_config["producers"]:
        yield "no producers"


def serve(row: Row, manifests: list[Manifest], folder: Path) -> None:
    """The real service with the pod's command line, from its start to its end."""
    container = on_this_machine(manifests, cached_checkpoint("qwen2_5_vl"), folder)
    row.cells["replaced here"] = " ".join(container.changes) or "-"
    service = container.service(f"chart-{row.case}")
    try:
        service.start()
        row.tell("start", _failure(service.wait_ready))
        if row.cells["start"] != "ok":
            return
        row.tell("probes", [f"{kind}: {why}" for kind in PROBES if (why := container.probe(kind))])
        row.tell("ports", strangers(container, manifests, service.pid))
        row.tell("end", _ending(lambda: end(service, container), container))
    finally:
        service.stop()


def strangers(container: Container, manifests: list[Manifest], pid: int) -> Iterator[str]:
    """Ports on which the service listens though no peer of the policy gets to them."""
    rules = of_kind(manifests, "NetworkPolicy")["spec"]["ingress"]
    ranges = [(port["port"], port.get("endPort", port["port"])) for rule in rules for port in rule["ports"]]
    for port in sorted(container.listening(pid)[1]):
        if not any(low <= port <= high for low, high in ranges):
            yield f"it listens on {port}, which the policy does not know"


def _failure(action: Callable[[], None]) -> Iterator[str]:
    try:
        action()
    except Exception as error:
        yield str(error)


def _ending(action: Callable[[], tuple[int, float]], container: Container) -> Iterator[str]:
    status, seconds = action()
    if status:
        yield f"exit status {status} after {seconds:.0f} s of {container.grace_s - container.pre_stop_s}"


def report(rows: list[Row], more: list[str]) -> int:
    """Prints the table, what is broken and the verdict; the exit status."""
    table = [("case", *CELLS), *((row.case, *(row.cells.get(cell, "-") for cell in CELLS)) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(CELLS) + 1)]
    print()
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    broken = [*(one for row in rows for one in row.broken), *more]
    print("", *broken, "CHART BROKEN" if broken or not rows else "CHART OK", sep="\n")
    return int(bool(broken) or not rows)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
