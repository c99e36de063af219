"""`make observe`: every query of the dashboard and the rules, asked of a Prometheus that scrapes real producers.

    python -m tests.observe [--seconds S] [--picture FILE]

Two producers serve a tiny model: `ec-producer serve` as it is, and one whose graphs are emulated, for there is no GPU.
Clients pull from them over gRPC, shared memory and NIXL, and an LLM-only vLLM answers chats with their embeddings.
Ends with `OBSERVE OK` and 0, or with a line for each thing that is wrong, `OBSERVE FAILED` and 1.
"""

import argparse
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from tests.kit.checkpoints import cached_checkpoint
from tests.kit.leftovers import leftovers, snapshot
from tests.kit.processes import MARK, MARK_VALUE, ServiceError
from tests.kit.servers import ENVIRONMENT, ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack
from tests.observe.load import LEASE_S, Chat, Client, load
from tests.observe.picture import draw
from tests.observe.prometheus import Prometheus, QueryError, Series
from tests.observe.queries import RULES, Declared, Query, dashboard_queries, may_be_empty, rule_queries, selectors
from tests.serving.service import wait_for

SECONDS = 25.0
"""For several scrapes of every kind of load; the leases that a client keeps expire meanwhile."""
SETTLE_S = 5.0
"""By when what happened was scraped and recorded, rates have forgotten the start, and what was stopped has gone."""
INTERRUPTED = 130
FAMILY = "qwen2_5_vl"
SETTINGS = {"lease-s": LEASE_S, "preprocess-workers": 1, "pool-bytes": 2 << 20, "drain-s": 3}
"""Small, so that a little load fills the pool and has embeddings evicted."""
GRAPHS = {"graph-rows": 256, "graph-items": 2}
"""Few, since they are emulated; a video has more frames than that, and misses."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.observe", description="The dashboard and the rules, tried.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long to load the producers")
    parser.add_argument("--picture", type=Path, help="PNG file to draw the dashboard's panels to")
    options = parser.parse_args(arguments)
    os.environ |= ENVIRONMENT | {MARK: MARK_VALUE}  # for the agents that clients start here, too
    before = snapshot()
    with tempfile.TemporaryDirectory(prefix="ec-observe-") as folder:
        wrong = observe(Path(folder), options.seconds, options.picture)
    wait_for(lambda: not leftovers(before), SETTLE_S)
    wrong += [f"left behind: {thing}" for thing in leftovers(before)]
    for line in wrong:
        print(f"FAILED: {line}")
    print("OBSERVE FAILED" if wrong else "OBSERVE OK")
    return int(bool(wrong))


def observe(folder: Path, seconds: float, picture: Path | None) -> list[str]:
    """Runs everything and prints it; what is wrong, a line each."""
    plain, graphs = producer("observe-plain"), producer("observe-graphs", emulated=True)
    vllm = VllmServer(cached_checkpoint(FAMILY), extra_args=consumer_args(plain.address, "auto"), name="observe-vllm")
    targets = [urlsplit(one).netloc for one in (plain.metrics_url, graphs.metrics_url)]
    instances = "|".join(targets)  # what 'All' is in Grafana
    prometheus = Prometheus(folder, RULES, {"ec-producer": targets, "vllm": [urlsplit(vllm.url).netloc]})
    try:
        with Stack() as stack:
            for service in (plain, graphs, vllm, prometheus):
                stack.start(service)
            stack.wait_ready(say)
            say(f"loading them for {seconds:.0f} s")
            begun_s = time.time()
            clients = [(plain.address, "nixl"), (plain.address, "shm"), (graphs.address, "grpc")]
            with load(partial(Chat, vllm.url), *(partial(Client, *one) for one in clients)):
                time.sleep(seconds)
                wrong = [*ask_all(prometheus, instances), *rules_at_work(prometheus)]
            if picture is not None:
                draw(prometheus, instances, begun_s + SETTLE_S, time.time(), picture)
                say(f"drew {picture}")
    except (ServiceError, AssertionError) as error:
        return [str(error)]
    return wrong


def producer(name: str, *, emulated: bool = False) -> ProducerServer:
    settings = SETTINGS | (GRAPHS if emulated else {})
    flags = [word for flag, value in settings.items() for word in (f"--{flag}", str(value))]
    flags += [] if emulated else ["--nixl-devices", "lo"]
    transports = ("grpc",) if emulated else ("nixl",)
    server = ProducerServer(cached_checkpoint(FAMILY), name=name, transports=transports, extra_args=flags)
    if emulated:
        server.command[:1] = [sys.executable, "-m", "tests.kit.emulated_serve"]
    return server


def ask_all(prometheus: Prometheus, instances: str) -> list[str]:
    """Asks every query and prints what it answers; what has no answer that should have one."""
    wrong, declared = [], Declared.now()
    for query in (*dashboard_queries(), *rule_queries()):
        why = [*declared.problems(query.expr), *answers(prometheus, query, instances)]
        wrong += [f"{query.where}: {one}" for one in why]
    return wrong


def answers(prometheus: Prometheus, query: Query, instances: str) -> Iterator[str]:
    """What is wrong with the answer to one query. An alert may be quiet, but all that it looks at has to be there."""
    own = query.resolved(instances)
    asked = [own]
    if query.kind == "alert":
        asked += sorted({selector.metric for selector in selectors(query.expr)})
    for expr in asked:
        try:
            found = prometheus.query(expr)
        except QueryError as error:
            print(f"{query.where}\n  {shown(expr)}\n    → {error}")
            yield str(error)
            continue
        is_condition = query.kind == "alert" and expr == own
        excuse = "quiet" if is_condition else may_be_empty(expr)
        said = summary(found) + (", if that lasts" if is_condition and found else "")
        print(f"{query.where}\n  {shown(expr)}\n    → {said or excuse or 'NOTHING'}")
        if not said and not excuse:
            yield f"no answer to {shown(expr)}"
        for series in found:
            yield from Declared.now().strays(expr, series.labels)


def rules_at_work(prometheus: Prometheus) -> Iterator[str]:
    """What is wrong with the rules as Prometheus runs them. The load is no reason for an alert."""
    time.sleep(SETTLE_S)
    for rule in prometheus.rules():
        if rule["health"] != "ok":
            yield f"{rule['name']} is {rule['health']}: {rule.get('lastError', 'not evaluated')}"
        if rule.get("state") == "firing":
            yield f"{rule['name']} fires: {rule['alerts']}"
        if rule["type"] == "recording" and not summary(prometheus.query(rule["name"])):
            yield f"{rule['name']} records nothing"


def summary(found: Sequence[Series]) -> str:
    """How many numbers there are, and which; "" for none. What is not a number is none."""
    values = sorted(value for series in found for _, value in series.points if not math.isnan(value))
    if not values:
        return ""
    numbers = f"{values[0]:.4g}" if values[0] == values[-1] else f"{values[0]:.4g} to {values[-1]:.4g}"
    return f"{numbers}  ({len(values)} series)"


def shown(expr: str) -> str:
    """On one line, without what chooses all."""
    return " ".join(re.sub(r'(namespace|instance)=~"[^"]*"(, )?', "", expr).replace("{}", "").split())


def say(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
