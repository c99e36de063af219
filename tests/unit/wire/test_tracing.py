"""Spans: what arrives at a collector, what does not, and that one that is down holds nobody up."""

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from producer.wire import tracing
from producer.wire.origin import NOBODY, Origin, current, work_for
from producer.wire.tracing import Tracing, annotate, span
from tests.kit.collector import Collector, named
from tests.kit.ports import free_port

TRACE_ID = "a" * 32
SAMPLED = Origin("id", f"00-{TRACE_ID}-{'b' * 16}-01", "vendor=1")
UNSAMPLED = Origin("id", f"00-{TRACE_ID}-{'b' * 16}-00")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def traced(collector: Collector) -> Iterator[Tracing]:
    traced = Tracing(collector.address, 1.0, "unit")
    yield traced
    traced.close()


def test_spans_lie_below_each_other_and_their_caller(collector: Collector, traced: Tracing) -> None:
    with work_for(SAMPLED), traced.span("outer", kind="server", rows=3) as outer:
        assert current() == outer.origin
        assert (current().request_id, current().trace_id, current().tracestate) == ("id", TRACE_ID, "vendor=1")
        with span(traced, "inner"):
            annotate(transport="shm")
        outer.set(code="OK")
    traced.close()
    found = {one.name: one for one in collector.spans}
    assert {one.trace_id for one in found.values()} == {TRACE_ID}
    assert {one.service for one in found.values()} == {"unit"}
    assert found["outer"].parent_id == "b" * 16
    assert found["inner"].parent_id == found["outer"].span_id
    assert found["outer"].attributes == {"rows": 3, "code": "OK"}
    assert found["inner"].attributes == {"transport": "shm"}
    assert not found["outer"].failed


def test_what_raises_has_failed(collector: Collector, traced: Tracing) -> None:
    with pytest.raises(KeyError), work_for(SAMPLED), traced.span("outer"):
        raise KeyError("SECRET")
    traced.close()
    (found,) = collector.spans
    assert found.failed
    assert found.attributes == {"error": "KeyError"}
    assert "SECRET" not in str(found)


def test_a_span_from_another_thread_after_the_fact(collector: Collector, traced: Tracing) -> None:
    thread = threading.Thread(target=traced.record, args=("step", SAMPLED, 1_000, 2_000), kwargs={"failed": True})
    thread.start()
    thread.join()
    traced.close()
    (found,) = collector.spans
    assert (found.name, found.parent_id, found.start_ns, found.end_ns) == ("step", "b" * 16, 1_000, 2_000)
    assert found.failed


def test_a_moment_on_the_clock_of_spans() -> None:
    before = time.time_ns()
    assert before <= tracing.from_perf_counter(time.perf_counter()) <= time.time_ns()
    assert abs(tracing.from_perf_counter(time.perf_counter() - 5) - (before - 5_000_000_000)) < 1_000_000_000


@pytest.mark.parametrize("origin", [UNSAMPLED, NOBODY])
def test_what_nobody_sampled_is_not_sent_but_handed_on(collector: Collector, origin: Origin) -> None:
    traced = Tracing(collector.address, 0.0, "unit")
    with work_for(origin), traced.span("outer") as outer:
        traced.record("step", outer.origin, 1, 2)
        assert current().trace_id
        assert not current().is_sampled
    traced.close()
    assert collector.spans == []


def test_a_caller_decides_whatever_the_ratio(collector: Collector) -> None:
    traced = Tracing(collector.address, 0.0, "unit")
    with work_for(SAMPLED), traced.span("outer"):
        pass
    traced.close()
    assert [one.name for one in collector.spans] == ["outer"]


def test_a_span_that_does_not_end_is_not_sent(collector: Collector, traced: Tracing) -> None:
    traced.begin("never")
    with traced.span("other"):
        pass
    traced.close()
    assert named(collector.spans, "other")
    assert len(collector.spans) == 1


def test_without_tracing_nothing_is_made() -> None:
    assert tracing.start("", 1.0, "unit") is None
    with work_for(SAMPLED), span(None, "outer", rows=1) as nothing:
        assert nothing is None
        assert current() == SAMPLED
        annotate(code="OK")
    first, second = span(None, "a"), span(None, "b")
    assert first is second


@pytest.mark.parametrize("down", ["refuses", "is silent"])
def test_a_collector_that_is_down_holds_nobody_up(down: str) -> None:
    """More spans than the queue holds, faster than any collector: no wait, and an end within its bound."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1] if down == "is silent" else free_port()
        traced = Tracing(f"127.0.0.1:{port}", 1.0, "unit")
        since_s = time.monotonic()
        for _ in range(5_000):
            with traced.span("one"):
                pass
        assert time.monotonic() - since_s < 20.0  # 4 ms each: a wait for the collector would be seconds each
        since_s = time.monotonic()
        traced.close()
        assert time.monotonic() - since_s < tracing._CLOSE_S + 5.0


def test_ids_do_not_repeat_where_python_is_seeded(collector: Collector, traced: Tracing) -> None:
    """As vLLM does in each of its processes."""
    state = random.getstate()
    for _ in range(2):
        random.seed(0)
        with traced.span("one"):
            pass
    random.setstate(state)
    traced.close()
    assert len({one.trace_id for one in collector.spans}) == 2
    assert len({one.span_id for one in collector.spans}) == 2


def test_closing_twice_is_closing_once(traced: Tracing) -> None:
    traced.close()
    traced.close()
    with traced.span("late"):
        pass


@pytest.mark.parametrize(
    "endpoint", ["c:4317", "http://c:4317", "https://c.example:443/", "10.0.0.1:1", "[::1]:4317", ""]
)
def test_endpoints(endpoint: str) -> None:
    tracing.check_settings(endpoint, 0.5)


@pytest.mark.parametrize(
    "endpoint", ["c", "ftp://c:1", "http://c", "c:port", "c:1/path", "user:word@c:1", 5, None, "c:1\n"]
)
def test_what_is_no_endpoint(endpoint: Any) -> None:
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint is .*; expected '' or host:port"):
        tracing.check_settings(endpoint, 0.5)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, "1", None, True, float("nan")])
def test_what_is_no_ratio(ratio: Any) -> None:
    with pytest.raises(ValueError, match=r"trace_sample_ratio is .*; allowed are 0 to 1"):
        tracing.check_settings("c:1", ratio)


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from producer.wire import tracing
assert tracing.start("", 1.0, "x") is None
try:
    tracing.start("collector:4317", 1.0, "x")
except tracing.TracingUnavailableError as error:
    print(error)
"""


def test_without_the_package_it_says_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "otlp_traces_endpoint is 'collector:4317' and OpenTelemetry is not installed" in done.stdout
    assert done.stdout.rstrip().endswith("pip install 'ec-producer[tracing]'")


def test_it_is_not_imported_where_it_is_off() -> None:
    code = "import sys, consumer_shim.pull, producer.calls; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
