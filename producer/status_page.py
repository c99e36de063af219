"""What the metrics port answers: /metrics for Prometheus, / and /status.json for people, /healthz for probes."""

import base64
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, make_wsgi_app

from producer.status import Status

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

logger = logging.getLogger(__name__)

_METHODS = ("GET", "HEAD")
_HEADERS = [
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
]
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    headers: list[tuple[str, str]]
    body: bytes


class StatusPage:
    """The WSGI application. Whoever reaches the port may ask; nothing can be changed through it."""

    def __init__(self, status: Status, registry: CollectorRegistry) -> None:
        self._status = status
        self._metrics: Callable[..., Any] = make_wsgi_app(registry)
        html = resources.files("producer").joinpath("status.html").read_text(encoding="utf-8")
        self._page = _answer("200 OK", "text/html; charset=utf-8", html.encode())
        self._page.headers.append(("Content-Security-Policy", _policy(html)))
        self._routes: dict[str, Callable[[dict[str, Any]], _Answer]] = {
            "/": lambda _: self._page,
            "/metrics": self._scrape,
            "/status.json": lambda _: self._document(),
            "/healthz": lambda _: self._health(),
        }

    def __call__(self, environ: dict[str, Any], start_response: "StartResponse") -> Iterable[bytes]:
        try:
            answer = self._route(environ)
        except Exception:  # whatever a metric's function raises must not end in a traceback on the wire
            logger.exception("an answer on the metrics port failed")
            answer = _answer("500 Internal Server Error", _TEXT, b"it failed; the log says why\n")
        start_response(answer.status, [*answer.headers, ("Content-Length", str(len(answer.body))), *_HEADERS])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [answer.body]

    def _route(self, environ: dict[str, Any]) -> _Answer:
        if environ["REQUEST_METHOD"] not in _METHODS:
            refusal = _answer("405 Method Not Allowed", _TEXT, b"GET and HEAD are allowed\n")
            return _Answer(refusal.status, [*refusal.headers, ("Allow", ", ".join(_METHODS))], refusal.body)
        route = self._routes.get(environ["PATH_INFO"])
        if route is None:
            return _answer("404 Not Found", _TEXT, f"there are {' '.join(self._routes)}\n".encode())
        return route(environ)

    def _scrape(self, environ: dict[str, Any]) -> _Answer:
        said: list[Any] = []
        body = b"".join(self._metrics({**environ, "REQUEST_METHOD": "GET"}, lambda *given: said.extend(given)))
        return _Answer(said[0], said[1], body)

    def _document(self) -> _Answer:
        text = json.dumps(self._status.document(), allow_nan=False)
        return _answer("200 OK", "application/json", text.encode())

    def _health(self) -> _Answer:
        state, reasons = self._status.state()
        body = "".join(f"{line}\n" for line in (state, *reasons)).encode()
        return _answer("200 OK" if state == "serving" else "503 Service Unavailable", _TEXT, body)


def _answer(status: str, content_type: str, body: bytes) -> _Answer:
    return _Answer(status, [("Content-Type", content_type)], body)


def _policy(html: str) -> str:
    """Nothing but the page's own style and script, by their hashes, and what it asks of this server."""
    return (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        f" frame-ancestors 'none'; style-src {_hashes('style', html)}; script-src {_hashes('script', html)}"
    )


def _hashes(tag: str, html: str) -> str:
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
