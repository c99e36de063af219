"""What the metrics port answers, asked as a WSGI application."""

import gzip
import json
import re
from typing import Any

import pytest
from grpc_health.v1 import health
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_text

from producer.config import ServeConfig
from producer.health import Health
from producer.metrics import Metrics
from producer.recent_errors import RecentErrors
from producer.status import Status
from producer.status_page import StatusPage
from tests.unit.test_status import EPOCH, MODEL


class Site:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.status = Status(ServeConfig(model="some/model"), self.metrics.registry, RecentErrors())
        self._page = StatusPage(self.status, self.metrics.registry)

    def ask(self, path: str, method: str = "GET", query: str = "", **headers: str) -> tuple[str, dict[str, str], bytes]:
        environ: dict[str, Any] = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
        environ |= {f"HTTP_{name.upper()}": value for name, value in headers.items()}
        said: list[Any] = []
        body = b"".join(self._page(environ, lambda *given: said.extend(given)))
        status, given = said
        assert len({name for name, _ in given}) == len(given), "a header is there twice"
        return status, dict(given), body

    async def serve(self, trouble: str = "") -> None:
        probes = {"device": lambda: trouble}
        status = Health(health.aio.HealthServicer(), probes, self.metrics)
        self.status.serve(MODEL, status, EPOCH)
        await status.check()


@pytest.fixture
def site() -> Site:
    return Site()


# /metrics


def test_metrics_as_prometheus_asks(site: Site) -> None:
    site.metrics.items.labels("OK").inc(3)
    status, headers, body = site.ask("/metrics")
    assert status == "200 OK"
    assert headers["Content-Type"].startswith("text/plain; version=")
    (items,) = (family for family in plain_text(body.decode()) if family.name == "ec_producer_items")
    assert sum(sample.value for sample in items.samples if sample.name.endswith("_total")) == 3


def test_metrics_in_open_metrics(site: Site) -> None:
    _, headers, body = site.ask("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert "ec_producer_items" in {family.name for family in open_metrics(body.decode())}


def test_metrics_compressed(site: Site) -> None:
    _, headers, body = site.ask("/metrics", accept_encoding="gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert headers["Content-Length"] == str(len(body))
    assert b"ec_producer_items" in gzip.decompress(body)


def test_some_metrics_by_name(site: Site) -> None:
    _, _, body = site.ask("/metrics", query="name[]=ec_producer_queue_items")
    assert [family.name for family in plain_text(body.decode())] == ["ec_producer_queue_items"]


# /healthz


async def test_health_follows_the_service(site: Site) -> None:
    site.status.enter("loading the model")
    assert site.ask("/healthz")[::2] == ("503 Service Unavailable", b"starting\nloading the model\n")
    await site.serve()
    assert site.ask("/healthz")[::2] == ("200 OK", b"serving\n")
    await site.serve("lost")
    assert site.ask("/healthz")[::2] == ("503 Service Unavailable", b"not serving\ndevice: lost\n")
    site.status.drain(20)
    status, headers, body = site.ask("/healthz")
    assert (status, body.splitlines()[0]) == ("503 Service Unavailable", b"draining")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"


# The page


def test_the_document(site: Site) -> None:
    status, headers, body = site.ask("/status.json")
    assert (status, headers["Content-Type"]) == ("200 OK", "application/json")
    assert json.loads(body)["model"]["name"] == "some/model"


def test_the_page_takes_nothing_from_outside(site: Site) -> None:
    status, headers, body = site.ask("/")
    assert (status, headers["Content-Type"]) == ("200 OK", "text/html; charset=utf-8")
    policy = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[kind])
    page = body.decode()
    assert set(re.findall(r"(?:src|href)=\"([^\"]*)\"", page)) == {"data:,", "/metrics", "/status.json", "/healthz"}
    assert set(re.findall(r"[a-z]+://[^\"'\s]*", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_the_page_makes_no_markup_of_text(site: Site) -> None:
    page = site.ask("/")[2].decode()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son[a-z]+=", page)


def test_nothing_is_kept_or_guessed(site: Site) -> None:
    for path in ("/", "/metrics", "/status.json", "/healthz", "/nowhere"):
        headers = site.ask(path)[1]
        assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")


# Requests


@pytest.mark.parametrize("path", ["/", "/metrics", "/status.json", "/healthz"])
def test_head_is_get_without_the_body(site: Site, path: str) -> None:
    status, headers, body = site.ask(path, "HEAD")
    assert (status, body) == (site.ask(path)[0], b"")
    assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(site: Site, method: str) -> None:
    for path in ("/", "/metrics"):
        status, headers, _ = site.ask(path, method)
        assert (status, headers["Allow"]) == ("405 Method Not Allowed", "GET, HEAD")


@pytest.mark.parametrize("path", ["/nowhere", "/metrics/", "/../etc/passwd", "/<script>", ""])
def test_other_paths_are_not_found(site: Site, path: str) -> None:
    status, _, body = site.ask(path)
    assert (status, body) == ("404 Not Found", b"there are / /metrics /status.json /healthz\n")


def test_a_metric_that_cannot_be_read_is_a_500(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> float:
        raise RuntimeError("the device is lost")

    site.metrics.queue_items.set_function(fail)
    for path in ("/status.json", "/metrics"):
        status, _, body = site.ask(path)
        assert (status, body) == ("500 Internal Server Error", b"it failed; the log says why\n")
    assert "the device is lost" in caplog.text
    assert site.ask("/")[0] == "200 OK"
