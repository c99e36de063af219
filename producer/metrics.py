"""Every Prometheus metric of the producer, declared once."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, PlatformCollector, ProcessCollector

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """Owns the registry. Counters may be used from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self.info = Info("ec_producer_model", "Model, versions and attention backend.", registry=registry)
        self.items = Counter(
            "ec_producer_items", "Items by outcome: a gRPC status code's name.", ["code"], registry=registry
        )
        self.shared = Counter(
            "ec_producer_items_shared", "Items that needed no encode of their own.", ["source"], registry=registry
        )
        self.queue_items = Gauge("ec_producer_queue_items", "Items admitted and not finished.", registry=registry)
        self.queue_bytes = Gauge("ec_producer_queue_bytes", "Bytes that those items keep waiting.", registry=registry)
        self.stage_seconds = Histogram(
            "ec_producer_stage_seconds",
            "Time an item or a step spends in a stage.",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.step_items = Histogram(
            "ec_producer_step_items", "Items in an encoder step.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self.graph_hits = Counter(
            "ec_producer_graph_hits", "Items that were encoded by replaying a captured graph.", registry=registry
        )
        self.graph_misses = Counter(
            "ec_producer_graph_misses", "Items that were encoded eagerly, by reason.", ["reason"], registry=registry
        )
        self.graph_replays = Counter(
            "ec_producer_graph_replays", "Replays, by the rows of the graph.", ["budget"], registry=registry
        )
        self.graph_rows = Counter(
            "ec_producer_graph_rows",
            "Rows that replays computed: of items ('real'), and for nothing ('padding').",
            ["kind"],
            registry=registry,
        )
        self.device_bytes = Gauge(
            "ec_producer_device_bytes",
            "The plan of device memory, by part: weights, activations, graphs (and graphs_reserved, what the plan had"
            " for them), rest. And held: what PyTorch holds of it now.",
            ["part"],
            registry=registry,
        )
        self.non_finite = Counter(
            "ec_producer_non_finite_outputs", "Items refused for NaN or infinity in their embedding.", registry=registry
        )
        self.pulls = Counter(
            "ec_producer_pulls", "Leases that a consumer released after a pull.", ["transport"], registry=registry
        )
        self.pull_bytes = Counter(
            "ec_producer_pull_bytes", "Block bytes of those pulls.", ["transport"], registry=registry
        )

    def watch_pool(self, name: str, help: str, value: Callable[[], float]) -> None:
        """A gauge `ec_producer_pool_<name>` that reads `value` at each scrape."""
        Gauge(f"ec_producer_pool_{name}", help, registry=self.registry).set_function(value)

    def count_replay(self, *, num_items: int, num_rows: int, num_padding_rows: int, budgets: Iterable[int]) -> None:
        """One replay, of a graph of each of `budgets`, that encoded `num_items`."""
        self.graph_hits.inc(num_items)
        self.graph_rows.labels("real").inc(num_rows)
        self.graph_rows.labels("padding").inc(num_padding_rows)
        for budget in budgets:
            self.graph_replays.labels(str(budget)).inc()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Observes the body's seconds in `stage`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.stage_seconds.labels(stage).observe(perf_counter() - start)
