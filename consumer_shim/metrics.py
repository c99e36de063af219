"""What the shim counts, and the counters of the process that sends media. vLLM's `/metrics` shows both.

Pulls happen in the engine's process and are counted by `pull_metrics`. Calls to producers are counted here, in
prometheus_client's own registry, which is the one that vLLM serves. Nothing is counted where it is not installed.
"""

import functools
import itertools
from typing import Any, Final

from producer.transport.registry import LIBRARY_TRANSPORTS
from producer.wire.contract import GRPC_TRANSPORT, SHM_TRANSPORT
from producer.wire.metric import GRPC_CODES, SECONDS, Declaration

NO_TRANSPORT: Final = "none"
TRANSPORTS: Final = (SHM_TRANSPORT, *LIBRARY_TRANSPORTS, GRPC_TRANSPORT)
OUTCOMES: Final = ("ok", "refused", "unreadable", "not_the_embedding", "timed_out", "failed")

PULLS: Final = Declaration(
    name="shim_pulls",
    kind="counter",
    unit="pulls",
    meaning="Pulls of embeddings, by how they ended and over which transport ('none' where it had come to none).",
    look="Others than ok: refused by a producer that is gone, was started again or has evicted the embedding;"
    " unreadable by the transport; timed_out after pull_timeout_s. Each is an HTTP 5xx, or a re-encode.",
    labels={"outcome": OUTCOMES, "transport": (*TRANSPORTS, NO_TRANSPORT)},
)
PULL_SECONDS: Final = Declaration(
    name="shim_pull_seconds",
    kind="histogram",
    unit="seconds",
    meaning="From a pull's begin until the checked embedding is there; of those that ended ok.",
    look="It is part of the time to first token. Much more than pull_bytes over the network's speed: a fallback"
    " transport, or a producer that is slow to answer.",
    labels={"transport": TRANSPORTS},
    buckets=SECONDS,
)
PULL_BYTES: Final = Declaration(
    name="shim_pull_bytes",
    kind="counter",
    unit="bytes",
    meaning="Block bytes of the pulls that ended ok.",
    look="The rate is the traffic into this server.",
    labels={"transport": TRANSPORTS},
)
ENCODES: Final = Declaration(
    name="shim_encodes",
    kind="counter",
    unit="calls",
    meaning="Encode calls to producers, by gRPC status; each attempt counts.",
    look="UNAVAILABLE: a producer is gone; RESOURCE_EXHAUSTED: none has room. A call is OK although some of its items"
    " may have failed: see ec_producer_items.",
    labels={"code": GRPC_CODES},
)
ENCODE_SECONDS: Final = Declaration(
    name="shim_encode_seconds",
    kind="histogram",
    unit="seconds",
    meaning="How long those calls took.",
    look="With ec_producer_queue_seconds and stage_seconds: what of it was waiting, encoding, and the way there.",
    buckets=SECONDS,
)
REENCODES: Final = Declaration(
    name="shim_reencodes",
    kind="counter",
    unit="requests",
    meaning="Requests whose media were encoded again since an embedding was lost before it was pulled.",
    look="Any throughout: the producers' pools are too small, their leases too short, or they are started again.",
)
DECLARATIONS: Final = (PULLS, PULL_SECONDS, PULL_BYTES, ENCODES, ENCODE_SECONDS, REENCODES)


def count_encode(code: str, seconds: float) -> None:
    """One call of Encode that has ended with this gRPC status."""
    encodes, encode_seconds = _own(ENCODES), _own(ENCODE_SECONDS)
    if encodes is not None:
        encodes.labels(code).inc()
        encode_seconds.observe(seconds)


def count_reencode() -> None:
    """One request that is begun again for an embedding that was lost."""
    reencodes = _own(REENCODES)
    if reencodes is not None:
        reencodes.inc()


def register() -> None:
    """Has the metrics of this process be there before anything is counted."""
    for declared in (ENCODES, ENCODE_SECONDS, REENCODES):
        _own(declared)


def make(declared: Declaration, kind: Any, more_labels: tuple[str, ...] = ()) -> Any:
    """The metric, of a class such as prometheus_client's; it has the labels of its declaration, then the others."""
    more: dict[str, Any] = {"buckets": declared.buckets} if declared.buckets else {}
    labels = [*declared.labels, *more_labels]
    return kind(name=declared.full_name, documentation=declared.meaning, labelnames=labels, **more)


def series(declared: Declaration) -> list[tuple[str, ...]]:
    """All sets of values that the labels of a declaration may have."""
    return list(itertools.product(*(map(str, values) for values in declared.labels.values())))


@functools.cache
def _own(declared: Declaration) -> Any:
    """The metric in this process's registry, once; None without prometheus_client."""
    try:
        import prometheus_client
    except ImportError:
        return None
    kind = {"counter": prometheus_client.Counter, "histogram": prometheus_client.Histogram}[declared.kind]
    metric = make(declared, kind)
    if declared.kind == "counter" and declared.labels:
        for values in series(declared):
            metric.labels(*values)
    return metric
