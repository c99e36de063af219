"""Every Prometheus metric of the producer, declared once: `docs/metrics.md` is made from what stands here."""

import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, PlatformCollector, ProcessCollector, disable_created_metrics

from producer import __version__
from producer.core import Lease
from producer.metric_types import Metric, counter, gauge, info, read, seconds
from producer.transport.registry import LIBRARY_TRANSPORTS
from producer.wire.contract import GRPC_TRANSPORT, SHM_TRANSPORT, WIRE_VERSION
from producer.wire.metric import GRPC_CODES, Declaration

OTHER = "other"
METHODS = ("Encode", "EncodeStream", "Acquire", "Release", "Fetch", "GetModelInfo", OTHER)
TRANSPORTS = (SHM_TRANSPORT, *LIBRARY_TRANSPORTS, GRPC_TRANSPORT)
PARTS = ("device", "preprocessing", *(f"transport {name}" for name in TRANSPORTS))
MISS_REASONS = (
    *("eager", "no_device", "unsupported_model", "capture_failed"),  # there are no graphs at all
    *("unsupported_modality", "too_large", "too_many_sequences", "not_exact", "not_compared_yet", "not_finite"),
)
BUDGETS = range(1, 1 << 24)


class Metrics:
    """Owns the registry, and by these names the metrics in it. All but the gauges may be used from any thread."""

    # Requests and items
    requests = counter(
        "calls",
        "Calls that have ended, by method and gRPC status; 'other' are health checks, reflection and unknown methods.",
        "Clients report errors: which call fails, and as what. An Encode is OK although some of its items failed.",
        method=METHODS,
        code=GRPC_CODES,
    )
    items = counter(
        "items",
        "Media items by outcome, as a gRPC status: OK is a ticket.",
        "The rate is the throughput. INVALID_ARGUMENT is the media's fault, RESOURCE_EXHAUSTED is lack of capacity,"
        " INTERNAL and UNAVAILABLE are the producer's.",
        code=GRPC_CODES,
    )
    items_shared = counter(
        "items",
        "Items that needed no encode of their own: found in the pool, or joined to an equal item in flight.",
        "How much work repeated media save. Falls when clients stop sending equal media to the same producer.",
        source=("pool", "in_flight"),
    )
    queue_items = gauge(
        "items",
        "Encodes admitted and not finished; equal items count once.",
        "Near max_queue_items, items are refused with RESOURCE_EXHAUSTED.",
    )
    queue_bytes = gauge(
        "bytes",
        "Bytes of media that waiting items keep in memory.",
        "Near max_queue_bytes, items are refused with RESOURCE_EXHAUSTED.",
    )
    queue_seconds = seconds(
        "What an item waits for a preprocessing process and then for a step, together.",
        "The signal to scale on: it grows as soon as more comes than is encoded.",
    )

    # Stages and steps
    stage_seconds = seconds(
        "Work on an item (preprocess, publish) or on a step (encode), without waiting for its turn.",
        "Which stage is the slow one. preprocess grows with the size of media, encode with that of steps.",
        stage=("preprocess", "encode", "publish"),
    )
    step_items = Metric(
        Histogram,
        "histogram",
        "items",
        "Items in an encoder step.",
        "1 throughout, under load: items do not meet. Many: each waits for the others.",
        buckets=(1, 2, 4, 8, 16, 32, 64),
    )
    preprocess_workers = gauge(
        "processes",
        "Preprocessing processes that are ready.",
        "Below preprocess_workers for long: processes do not start, or media kill them.",
    )
    preprocess_deaths = read(
        "processes",
        "Preprocessing processes that ended unasked, or were ended since they hung.",
        "Rises with media that crash decoders or take too long; whoever sends them gets INVALID_ARGUMENT.",
    )
    stalled_seconds = gauge(
        "seconds",
        "For how long the step in hand has made no progress; 0 where there is none.",
        "Above some seconds the device or its driver hangs. At stall_s health is NOT_SERVING; later the process ends.",
    )
    non_finite_outputs = counter(
        "items",
        "Items refused for NaN or infinity in their embedding.",
        "Any at all: the model overflows in this dtype, the weights are broken, or the device is.",
    )

    # Graphs and device memory
    graph_hits = counter(
        "items",
        "Items that were encoded by replaying a captured graph.",
        "With graph_misses: the hit ratio. Below 90 % on a GPU, look at the reasons of the misses.",
    )
    graph_misses = counter(
        "items",
        "Items that were encoded eagerly, by reason.",
        "too_large: raise graph_rows; too_many_sequences: raise graph_items; capture_failed: see the log of the start.",
        reason=MISS_REASONS,
    )
    graph_replays = counter(
        "replays",
        "Replays of captured graphs, by the rows of the graph.",
        "Which budgets are used; those that never are cost memory.",
        budget=BUDGETS,
    )
    graph_rows = counter(
        "rows",
        "Rows that replays computed, by the rows of the graph: of items ('real'), and for nothing ('padding').",
        "padding over all is the waste. The ladder of budgets wastes a tenth on average; more means odd sizes.",
        budget=BUDGETS,
        kind=("real", "padding"),
    )
    device_bytes = gauge(
        "bytes",
        "The plan of device memory, by part: weights, activations, graphs (and graphs_reserved, what the plan had for"
        " them), rest. And held: what PyTorch holds of it now. On a GPU only.",
        "rest is what more budgets or larger steps can have. held rising towards the device's size is a leak.",
        part=("weights", "activations", "graphs", "graphs_reserved", "rest", "held"),
    )
    slot_wait_seconds = seconds(
        "What a step waits until a slot's last inputs were read by the device.",
        "More than a millisecond throughout: raise num_slots.",
    )

    # Pool and leases
    pool_bytes = gauge("bytes", "Size of the embedding pool.", "To compare pool_used_bytes with.")
    pool_used_bytes = gauge(
        "bytes",
        "Bytes of the pool that hold embeddings.",
        "Full is normal, since what nobody holds is evicted. Full of pinned entries is not.",
    )
    pool_entries = gauge(
        "embeddings",
        "Embeddings in the pool.",
        "To compare pool_pinned_entries with; small while pool_bytes is used up: embeddings are large.",
    )
    pool_pinned_entries = gauge(
        "embeddings",
        "Embeddings that a lease or a writer holds; they cannot be evicted.",
        "Near pool_entries with a full pool, items are refused with RESOURCE_EXHAUSTED: raise pool_bytes.",
    )
    pool_leases = gauge(
        "leases",
        "Leases that have not ended.",
        "Near max_leases, items are refused. Rising without load: consumers do not release.",
    )
    pool_lookups = counter(
        "items",
        "Items that were looked for in the pool before an encode.",
        "hit over all is the pool's hit ratio. Falling with evictions rising: the pool is too small.",
        result=("hit", "miss"),
    )
    pool_evictions = read(
        "embeddings",
        "Embeddings that made room for others.",
        "As many as items, and hits rare: the pool is too small, or media do not repeat.",
    )
    leases_granted = read("leases", "Leases granted, for tickets and for pulls.", "To compare leases_expired with.")
    leases_expired = read(
        "leases",
        "Leases that ended by their time and not by a release.",
        "Rises when consumers die, hang, or never use their tickets.",
    )

    # Pulls
    pulls = counter(
        "pulls",
        "Pulls that a consumer ended with a Release, by transport.",
        "Which transport is used: one that is slower than expected is a fallback.",
        transport=TRANSPORTS,
    )
    pull_bytes = counter("bytes", "Block bytes of those pulls.", "The rate is the traffic.", transport=TRANSPORTS)
    pull_seconds = seconds(
        "From Acquire to Release, as the producer sees it.",
        "Grows with load of the network, or of the consumers.",
        transport=TRANSPORTS,
    )
    pull_failures = counter(
        "pulls",
        "Pulls that did not end well: their lease was never released, or the transport is down.",
        "Any throughout: consumers give up, or the transport's agent keeps dying; part_up and the log say which.",
        transport=TRANSPORTS,
    )

    # The process
    part_up = gauge(
        "1 or 0",
        "Whether a part that an encode needs works; health is SERVING while all do.",
        "0: the log says why. A part that is missing is not served.",
        part=PARTS,
    )
    model = info(
        "Model, attention backend and the versions that encode it.",
        "Two producers answer differently: compare.",
        *("model", "dtype", "attention", "torch", "vllm"),
    )
    build = info(
        "Versions of this producer, of its wire format and of Python.",
        "While versions are rolled out: who runs what.",
        *("version", "wire_version", "python"),
    )

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second family for each, of which nobody makes use
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        for name, one in self._declared().items():
            self.__dict__[name] = one.open(self.registry)
        python = platform.python_version()
        self.build.info({"version": __version__, "wire_version": str(WIRE_VERSION), "python": python})

    @classmethod
    def declarations(cls) -> list[Declaration]:
        """Of all metrics, in the order in which they are documented."""
        return [one.declaration for one in cls._declared().values()]

    @classmethod
    def _declared(cls) -> Mapping[str, Metric[Any]]:
        return {name: one for name, one in vars(cls).items() if isinstance(one, Metric)}

    def count_replay(self, *, num_items: int, graphs: Iterable[tuple[int, int]]) -> None:
        """One replay that encoded `num_items`, by `graphs` of so many rows each, so many of them the items'."""
        self.graph_hits.inc(num_items)
        for budget, num_rows in graphs:
            self.graph_replays.labels(str(budget)).inc()
            self.graph_rows.labels(str(budget), "real").inc(num_rows)
            self.graph_rows.labels(str(budget), "padding").inc(budget - num_rows)

    def count_pull(self, transport: str, num_bytes: int, seconds: float) -> None:
        """A pull that its consumer has released."""
        self.pulls.labels(transport).inc()
        self.pull_bytes.labels(transport).inc(num_bytes)
        self.pull_seconds.labels(transport).observe(seconds)

    def count_expiry(self, lease: Lease) -> None:
        """A lease that ended by its time; where it was for a pull, that failed."""
        if lease.transport:
            self.pull_failures.labels(lease.transport).inc()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Observes the body's seconds in `stage`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.stage_seconds.labels(stage).observe(perf_counter() - start)
