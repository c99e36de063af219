"""Several services that live and die together."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from typing_extensions import Self

from tests.kit.processes import POLL_S, Ending, Service

PROGRESS_S = 10.0

Progress = Callable[[str], None]


class Stack:
    """Services that end together when the block is left, for whatever reason.

    In the main thread SIGTERM and SIGHUP leave it like Ctrl-C does, as
    `KeyboardInterrupt`; while services are ending, none of the three interrupts.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._services: list[Service] = []
        self._handlers: dict[signal.Signals, object] = {}

    def start(self, service: Service) -> None:
        """Start a service without waiting for it."""
        self._services.append(service)
        service.start()

    def wait_ready(self, progress: Progress) -> None:
        """Block until every service answers, telling which do and which are awaited. Raises `ServiceError`."""
        pending = [service for service in self._services if not service.was_ready]
        spoke_s = time.monotonic()
        while pending:
            time.sleep(POLL_S)
            ready = [service for service in pending if service.poll_ready()]
            pending = [service for service in pending if service not in ready]
            if ready or time.monotonic() - spoke_s >= PROGRESS_S:
                spoke_s = time.monotonic()
                progress("; ".join([*(f"{service.name} is ready" for service in ready), *_awaited(pending)]))

    def stop(self, service: Service) -> Ending | None:
        self._services.remove(service)
        return service.stop()

    def stop_all(self) -> dict[str, Ending]:
        """End every service at the same time; how each ended, by name."""
        services, self._services = self._services, []
        for service in services:
            service.request_stop()
        endings = {service.name: service.stop() for service in services}
        return {name: ending for name, ending in endings.items() if ending}

    def __enter__(self) -> Self:
        self._handle(_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle(signal.SIG_IGN)
        try:
            self.stop_all()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._handlers.setdefault(number, signal.signal(number, handler))


def _awaited(services: list[Service]) -> list[str]:
    return [f"waiting for {', '.join(service.name for service in services)}"] if services else []


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
