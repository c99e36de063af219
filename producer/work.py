"""One encode, from the threads that preprocess over the device's thread back to the event loop."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

from producer.core import PreparedItem
from producer.mailbox import Mailbox
from producer.wire.tracing import Span, Tracing


class Work:
    """An encode under way, and who waits for it: through preprocessing to the device, past the event loop.

    `stage` is the future that it waits for. It is cancelled when nobody waits any more.
    """

    __slots__ = ("_mailbox", "_submit", "_within", "error", "has_ended", "is_cancelled", "key", "stage", "waiters")

    def __init__(self, key: str, submit: Callable[[PreparedItem], "Future[None]"], mailbox: "Mailbox[Work]") -> None:
        """`submit` is called on whichever thread ends preprocessing; `mailbox` gets the work at its end, once."""
        self.key = key
        self.waiters: set[asyncio.Future[None]] = set()
        self.stage: Future[Any] | None = None
        self.error: BaseException | None = None
        self.has_ended = False
        self.is_cancelled = False
        self._submit = submit
        self._mailbox = mailbox
        self._within = copy_context()  # whom it is for, on whichever thread it goes on

    def follow(self, preparing: "Future[PreparedItem]", span: Span | None, tracing: Tracing | None) -> None:
        """Has it go on once `preparing` ends, which `span` is about."""
        self.stage = preparing
        preparing.add_done_callback(functools.partial(self._go_on, span, tracing))

    def cancel(self) -> None:
        """Drops it, as far as that can be done; nothing new is begun for it."""
        self.is_cancelled = True
        self._cancel_stage()

    def wake(self) -> None:
        """It has ended; `error` and `is_cancelled` say how."""
        self.has_ended = True
        for waiter in self.waiters:
            wake(waiter)

    def _go_on(self, span: Span | None, tracing: Tracing | None, preparing: "Future[PreparedItem]") -> None:
        """Preprocessing is over: the device comes next."""
        if span is not None and tracing is not None:
            _end_span(tracing, span, preparing)
        if self.is_cancelled or preparing.cancelled() or preparing.exception() is not None:
            return self._end(preparing)
        try:
            submitted = self._within.run(self._submit, preparing.result())
        except Exception as error:  # whatever it is, those who wait are told
            self.error = error
            return self._mailbox.post(self)
        self.stage = submitted
        submitted.add_done_callback(self._end)
        self._cancel_stage()  # the event loop may have cancelled meanwhile what it saw, the stage before

    def _cancel_stage(self) -> None:
        if self.is_cancelled and self.stage is not None:
            self.stage.cancel()

    def _end(self, stage: "Future[Any]") -> None:
        if stage.cancelled():
            self.is_cancelled = True
        else:
            self.error = stage.exception()
        self._mailbox.post(self)


def _end_span(tracing: Tracing, span: Span, preparing: "Future[PreparedItem]") -> None:
    error = asyncio.CancelledError() if preparing.cancelled() else preparing.exception()
    if error is None:
        prepared = preparing.result()
        span.set(rows=prepared.num_rows, waited_s=round(prepared.waited_s, 6))
    else:
        span.fail(error=type(error).__name__)
    tracing.end(span)


def wake(waiter: "asyncio.Future[None]") -> None:
    """Ends a wait, if it has not ended."""
    if not waiter.done():
        waiter.set_result(None)
