"""The status page as people see it: in a browser, of a real producer, from its first second to its last."""

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from consumer_shim.client import Producer
from producer.config import ServeConfig
from producer.http_server import HttpServer
from producer.metrics import Metrics
from producer.recent_errors import RecentErrors
from producer.status import Status
from producer.status_page import StatusPage
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.e2e.conftest import REPOSITORY
from tests.kit.browser import Browser, browser
from tests.kit.photos import photos
from tests.kit.servers import ProducerServer
from tests.kit.stack import Stack

pytestmark = pytest.mark.e2e

PICTURES = REPOSITORY / ".cache" / "pictures"
"""Where the pages that these tests saw can be looked at."""
SECTIONS = [
    *("Health", "Throughput", "Recent errors", "Queue", "Embedding pool", "Process", "Graphs", "Transports"),
    *("Device memory", "Model and versions"),
]
CONTRAST = """
const light = (color) => {
  const [r, g, b] = color.match(/[0-9.]+/g).map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)|transparent/.test(color)) return color;
  }
};
return [...document.querySelectorAll("body *")]
  .filter((node) => [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim()))
  .filter((node) => node.checkVisibility() && !["SCRIPT", "STYLE"].includes(node.tagName))
  .map((node) => {
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), node.innerText];
  }).sort((a, b) => a[0] - b[0])[0];
"""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as window:
        yield window


@pytest.fixture(scope="module")
def served(model: Path, stack: Stack) -> Iterator[ProducerServer]:
    """On its way: the first test watches it start."""
    server = ProducerServer(model, name="e2e-status", extra_args=("--drain-s", "10"))
    server.start()
    yield server
    server.stop()


def page_of(server: ProducerServer) -> str:
    return server.metrics_url.removesuffix("metrics")


def encode(server: ProducerServer, data: bytes) -> pb.Ticket:
    client = Producer(server.address)
    try:
        (outcome,) = client.encode([pb.MediaItem(modality=pb.MODALITY_IMAGE, data=data)], 60)
        if isinstance(outcome, pb.Ticket):
            client.fetch(outcome, 60)
        return outcome
    finally:
        client.close()


def probe(server: ProducerServer) -> int:
    """What a probe of Kubernetes gets; 0 for no answer."""
    try:
        with urllib.request.urlopen(f"{page_of(server)}healthz", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def test_a_start_can_be_watched(served: ProducerServer, window: Browser) -> None:
    window.wait(lambda: probe(served) == 503, "the port")
    window.open(page_of(served))
    window.wait(lambda: window.text("#state") == "starting", "the start")
    window.wait(lambda: window.text("#reasons") == "loading the model", "a stage")
    assert window.text("#name") == served.command[2]
    window.save_picture(PICTURES / "status-starting.png")
    served.wait_ready()
    assert probe(served) == 200
    window.wait(lambda: window.text("#state") == "serving", "that it serves")
    assert not window.run("return document.querySelector('#reasons').checkVisibility()")


def test_values_appear_and_change(served: ProducerServer, window: Browser) -> None:
    window.wait(lambda: "items so far 0" in window.text("#flow"), "no items")
    assert window.text("#parts").endswith("device up preprocessing up transport shm up transport grpc up")
    assert "None since the start." in window.text("#errors")
    encode(served, photos()["chelsea.png"].data)
    window.wait(lambda: "items so far 1" in window.text("#flow"), "an item")
    window.wait(lambda: "grpc 1 " in window.text("#transports"), "a pull")
    pool = window.text("#pool")
    encode(served, photos()["rocket.jpg"].data)
    window.wait(lambda: "items so far 2" in window.text("#flow"), "another item")
    assert window.text("#pool") != pool
    assert "no_device" in window.text("#graphs")


def test_an_error_appears_without_what_was_sent(served: ProducerServer, window: Browser) -> None:
    for _ in range(3):
        encode(served, b"<img src=x> no picture")
    window.wait(lambda: "MEDIA_UNREADABLE INVALID_ARGUMENT, item 3" in window.text("#errors"), "the error")
    assert "no picture" not in window.text("body")


def test_it_has_headings_and_named_tables(served: ProducerServer, window: Browser) -> None:
    assert window.run("return [...document.querySelectorAll('h2')].map((one) => one.textContent)") == SECTIONS
    assert window.run("return document.querySelectorAll('h1').length") == 1
    assert window.run("return document.documentElement.lang") == "en"
    assert window.run("return [...document.querySelectorAll('table')].filter((one) => !one.ariaLabel).length") == 0
    heads = "return [...document.querySelectorAll('th')].filter((one) => !['col', 'row'].includes(one.scope)).length"
    assert window.run(heads) == 0
    assert (
        window.run("return [...document.querySelectorAll('[role=meter]')].filter((one) => !one.ariaLabel).length") == 0
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "width", "height"), [("wide", 1400, 1000), ("narrow", 375, 2600)])
def test_it_is_legible(
    served: ProducerServer, window: Browser, scheme: str, name: str, width: int, height: int
) -> None:
    window.prefer(scheme)
    window.resize(width, height)
    back = window.run("return getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(244, 246, 248)", "dark": "rgb(16, 21, 27)"}[scheme]
    assert window.run("return document.documentElement.scrollWidth") <= width
    contrast, text = window.run(CONTRAST)
    assert contrast >= 4.5, text
    window.save_picture(PICTURES / f"status-{scheme}-{name}.png")


def test_nothing_was_complained_of_or_asked_elsewhere(served: ProducerServer, window: Browser) -> None:
    assert window.complaints() == []
    assert window.hosts() == {page_of(served).split("/")[2]}


def test_an_end_can_be_watched(served: ProducerServer, window: Browser) -> None:
    """While it drains, and when it has gone: what is shown then says how old it is."""
    ticket = encode(served, photos()["coffee.jpg"].data)  # whose lease it waits for
    assert isinstance(ticket, pb.Ticket)
    client = Producer(served.address)
    client.encode([pb.MediaItem(modality=pb.MODALITY_IMAGE, data=photos()["coffee.jpg"].data)], 60)
    client.close()
    os.kill(served.pid, signal.SIGTERM)
    window.wait(lambda: window.text("#state") == "draining", "the drain")
    assert "have" in window.text("#reasons")
    assert probe(served) == 503
    window.wait(lambda: window.text("#state") == "unreachable", "the end")
    assert "The producer does not answer" in window.text("#stale")
    assert "what is shown is of" in window.text("#stale")
    window.save_picture(PICTURES / "status-gone.png")


# What others say is text


HOSTILE = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script><b>&amp;"


@contextmanager
def page_at(status: Status, metrics: Metrics) -> Iterator[str]:
    """The page over figures that are a test's; its address."""
    server = HttpServer("127.0.0.1", 0, StatusPage(status, metrics.registry))
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}/"
    finally:
        server.close()


@contextmanager
def hostile_page() -> Iterator[str]:
    """Every text of the document that could come from outside is markup."""
    metrics, errors = Metrics(), RecentErrors()
    errors.add(HOSTILE, HOSTILE, HOSTILE)
    status = Status(ServeConfig(model=HOSTILE, advertise=f"{HOSTILE}:1"), metrics.registry, errors)
    status.enter(HOSTILE)
    whole = status.document

    def document() -> dict[str, object]:
        told = whole()
        told["parts"] = [{"name": HOSTILE, "is_up": False, "trouble": HOSTILE}]
        told["model"] |= {"fingerprint": HOSTILE, "attention": HOSTILE, "widths": {HOSTILE: HOSTILE}, "epoch": HOSTILE}
        told["model"]["versions"][HOSTILE] = HOSTILE
        told["graphs"]["misses"] = {HOSTILE: 1}
        told["totals"]["requests"] = {HOSTILE: 1}
        told["device_bytes"] = {HOSTILE: 1}
        told["transports"][0]["name"] = HOSTILE
        return told

    status.document = document
    with page_at(status, metrics) as url:
        yield url


def test_what_only_a_gpu_has(window: Browser) -> None:
    """Budgets, waste and the plan of device memory, of figures that a GPU could have had."""
    metrics = Metrics()
    for budget, replays, real, padding in ((64, 40, 2200, 360), (1024, 9, 9000, 216), (4096, 3, 9216, 3072)):
        metrics.graph_replays.labels(str(budget)).inc(replays)
        metrics.graph_rows.labels(str(budget), "real").inc(real)
        metrics.graph_rows.labels(str(budget), "padding").inc(padding)
    metrics.graph_hits.inc(95)
    metrics.graph_misses.labels("too_large").inc(4)
    metrics.graph_misses.labels("too_many_sequences").inc(1)
    sizes = {"weights": 1300, "activations": 2100, "graphs": 410, "graphs_reserved": 600, "rest": 70000, "held": 4000}
    for part, mebibytes in sizes.items():
        metrics.device_bytes.labels(part).set(mebibytes << 20)
    status = Status(ServeConfig(model="m"), metrics.registry, RecentErrors())
    with page_at(status, metrics) as url:
        window.resize(1400, 1000)
        window.open(url)
        window.wait(lambda: window.text("#state") == "starting", "the page")
        graphs, device = window.text("#graphs"), window.text("#device")
        window.save_picture(PICTURES / "status-gpu.png")
        window.open("about:blank")
    assert "items by a graph 95 hit ratio 95 % padding waste 15.2 %" in graphs
    assert "too_large 4 too_many_sequences 1" in graphs
    assert "64 40 14.1 % 1,024 9 2.3 % 4,096 3 25 %" in graphs
    assert "weights 1.3 GiB" in device
    assert "rest 68.4 GiB" in device


def test_markup_in_text_is_text(window: Browser) -> None:
    window.complaints()
    with hostile_page() as url:
        window.open(url)
        window.wait(lambda: window.text("#state") == "starting", "the page")
        for place in ("#name", "#line", "#reasons", "#parts", "#errors", "#graphs", "#transports", "#device", "#model"):
            assert " ".join(HOSTILE.split()) in window.text(place), place
        assert window.run("return document.querySelectorAll('img, b').length") == 0
        assert window.run("return document.scripts.length") == 1
        assert window.run("return document.title").startswith("starting ")
        window.open("about:blank")
    assert window.complaints() == []


def test_what_a_browser_may_do_there_is_nothing_more(window: Browser) -> None:
    """Even markup that got in could not run or load anything."""
    with hostile_page() as url:
        window.open(url)
        script = """
        const node = document.createElement("div"), other = document.createElement("script");
        node.innerHTML = arguments[0];
        other.textContent = "document.title = 'taken'";
        document.body.append(node, other);
        """
        window.run(script, HOSTILE)
        window.wait(lambda: any("Content Security Policy" in line for line in window.complaints()), "the refusal")
        assert window.run("return document.title") != "taken"
        window.open("about:blank")
