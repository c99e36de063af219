"""The one thread that drives the device. Everyone else hands it work through `submit`."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

import torch

from producer.batcher import Batcher
from producer.core import PreparedItem
from producer.errors import InternalError, ServiceError, UnavailableError
from producer.metrics import Metrics
from producer.wire.contract import Reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    item: PreparedItem
    done: "Future[None]"
    submitted_s: float

    @property
    def modality(self) -> str:
        return self.item.modality

    @property
    def num_rows(self) -> int:
        return self.item.num_rows


class StepLoop:
    """Owns the device thread and the queue before it. The queue is bounded by admission."""

    def __init__(
        self,
        encode: Callable[[Sequence[PreparedItem]], Sequence[torch.Tensor]],
        publish: Callable[[PreparedItem, torch.Tensor], None],
        *,
        max_rows: int,
        max_items: int,
        metrics: Metrics,
        graph_miss_reason: str,
    ) -> None:
        """`encode` and `publish` are called on the device thread only."""
        self._encode = encode
        self._publish = publish
        self._batcher: Batcher[_Job] = Batcher(max_rows=max_rows, max_items=max_items)
        self._metrics = metrics
        self._graph_miss_reason = graph_miss_reason
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, item: PreparedItem) -> "Future[None]":
        """A future that ends when `item` is in the pool, or with the `ServiceError` that kept it out.

        Cancelling it drops the item, if its step has not begun.
        """
        job = _Job(item, Future(), perf_counter())
        with self._changed:
            if self._stopping:
                raise UnavailableError(Reason.SHUTTING_DOWN, "the service is shutting down")
            self._batcher.add(job)
            self._changed.notify()
        job.done.add_done_callback(lambda done: self._drop(job) if done.cancelled() else None)
        return job.done

    def stop(self) -> None:
        """Refuses what waits, ends after the step in hand, and joins the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _drop(self, job: _Job) -> None:
        """Lets go of a cancelled item's inputs; its step may have taken it already."""
        with self._changed:
            self._batcher.discard(job)

    def _run(self) -> None:
        while jobs := self._next_step():
            live = [job for job in jobs if job.done.set_running_or_notify_cancel()]
            if live:
                for job in live:
                    self._metrics.stage_seconds.labels("queue").observe(perf_counter() - job.submitted_s)
                self._step(live)

    def _next_step(self) -> list[_Job]:
        """Waits for work; empty when the loop is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or len(self._batcher))
            if not self._stopping:
                return self._batcher.take()
            while waiting := self._batcher.take():
                for job in waiting:
                    _fail(job, UnavailableError(Reason.SHUTTING_DOWN, "the service is shutting down"))
            return []

    def _step(self, jobs: list[_Job]) -> None:
        """One encoder step. If it fails, each item is tried alone, so that a bad one does not void the others."""
        self._metrics.step_items.observe(len(jobs))
        self._metrics.graph_misses.labels(self._graph_miss_reason).inc()
        try:
            with self._metrics.time("encode"):
                embeddings = self._encode([job.item for job in jobs])
            if len(embeddings) != len(jobs):
                raise RuntimeError(f"the encoder returned {len(embeddings)} embeddings for {len(jobs)} items")
        except Exception as error:  # whatever the model raises, the loop lives
            logger.exception("a step of %d items failed", len(jobs))
            if len(jobs) > 1:
                for job in jobs:
                    self._step([job])
                return
            _fail(jobs[0], InternalError(Reason.ENCODE_FAILED, f"encoding failed: {type(error).__name__}"))
            return
        for job, embedding in zip(jobs, embeddings, strict=True):
            self._finish(job, embedding)

    def _finish(self, job: _Job, embedding: torch.Tensor) -> None:
        try:
            with self._metrics.time("publish"):
                self._publish(job.item, embedding)
        except ServiceError as error:
            _fail(job, error)
        except Exception as error:  # as above
            logger.exception("publishing failed")
            _fail(job, InternalError(Reason.ENCODE_FAILED, f"publishing failed: {type(error).__name__}"))
        else:
            job.done.set_result(None)


def _fail(job: _Job, error: ServiceError) -> None:
    if not job.done.done():
        job.done.set_exception(error)
