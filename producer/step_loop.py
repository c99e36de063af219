"""The one thread that drives the device. Everyone else hands it work through `submit`.

While the device is at one step, the next is launched, so that it need not wait for the host. The loop tells a step that
is slow from one that is stuck by the encoder's `tick`, and ends itself when the device is lost.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Protocol

import torch

from producer.batcher import Batcher
from producer.core import PreparedItem
from producer.errors import InternalError, ServiceError, UnavailableError
from producer.metrics import Metrics
from producer.wire.contract import Reason
from producer.wire.origin import NOBODY, Origin, current, work_for
from producer.wire.tracing import Tracing, from_perf_counter, span

logger = logging.getLogger(__name__)


class Step(Protocol):
    """A step that was launched."""

    def finish(self) -> Sequence[torch.Tensor | ServiceError]:
        """Waits for the device: each item's embedding, or what it is refused with."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    item: PreparedItem
    done: "Future[None]"
    submitted_s: float
    origin: Origin

    @property
    def modality(self) -> str:
        return self.item.modality

    @property
    def num_rows(self) -> int:
        return self.item.num_rows


@dataclass(frozen=True, eq=False, slots=True)
class _Launched:
    jobs: list[_Job]
    step: Step
    since_s: float


class StepLoop:
    """Owns the device thread and the queue before it. The queue is bounded by admission."""

    def __init__(
        self,
        launch: Callable[[Sequence[PreparedItem]], Step],
        publish: Callable[[PreparedItem, torch.Tensor], None],
        *,
        max_rows: int,
        max_items: int,
        max_steps: int = 1,
        num_publishers: int = 0,
        metrics: Metrics,
        tracing: Tracing | None = None,
    ) -> None:
        """`launch` is called on the device thread only, with at most `max_steps` under way; `publish` on threads of its
        own, as many as there are publishers, or on the device thread, too.
        """
        self._launch = launch
        self._publish = publish
        self._batcher: Batcher[_Job] = Batcher(max_rows=max_rows, max_items=max_items)
        self._max_steps = max_steps
        self._under_way: deque[_Launched] = deque()
        self._taken: list[_Job] = []
        self._metrics = metrics
        self._tracing = tracing
        self._num_traced = 0
        self._encode_seconds = metrics.stage_seconds.labels("encode")
        metrics.stalled_seconds.set_function(lambda: self.stalled_s)
        self._changed = threading.Condition()
        self._publishers = ThreadPoolExecutor(num_publishers, "publisher") if num_publishers else None
        self._stopping = False
        self._lost = ""
        self._progress_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tick(self) -> None:
        """The step in hand has come further; called within `launch` as often as there is something to tell."""
        self._progress_s = monotonic()

    @property
    def stalled_s(self) -> float:
        """Seconds since the step in hand last came further; 0 between steps."""
        since_s = self._progress_s
        return 0.0 if since_s is None else monotonic() - since_s

    @property
    def lost(self) -> str:
        """Why this process can encode nothing any more; "" while it can."""
        return self._lost

    def submit(self, item: PreparedItem) -> "Future[None]":
        """A future that ends when `item` is in the pool, or with the `ServiceError` that kept it out.

        Cancelling it drops the item, if its step has not begun.
        """
        job = _Job(item, Future(), perf_counter(), current())
        with self._changed:
            if self._stopping:
                raise self._refusal()
            self._batcher.add(job)
            self._changed.notify()
        job.done.add_done_callback(lambda done: self._drop(job) if done.cancelled() else None)
        return job.done

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Refuses what waits, ends after the step in hand, and joins the thread; whether it ended in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _drop(self, job: _Job) -> None:
        """Lets go of a cancelled item's inputs; its step may have taken it already."""
        with self._changed:
            self._batcher.discard(job)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException:  # nothing is to end this thread; if something does, nobody may wait for it
            logger.exception("the device thread failed")
            self._lose("the device thread failed")
        self._progress_s = None
        if self._publishers is not None:
            self._publishers.shutdown()  # copies from memory to memory, which end soon
        self._refuse(self._taken)

    def _turn(self) -> bool:
        """Launches what waits, and finishes the oldest step if there are enough or nothing waits; False at the end."""
        jobs = self._next_step()
        self._taken = [job for job in self._taken if not job.done.done()] + jobs
        if jobs:
            self._observe_waits(jobs)
            self._begin(jobs)
        elif not self._under_way:
            return False
        if self._under_way and (not jobs or len(self._under_way) >= self._max_steps):
            self._finish(self._under_way.popleft())
        if not self._under_way:
            self._progress_s = None
        return True

    def _observe_waits(self, jobs: list[_Job]) -> None:
        now_s = perf_counter()
        for job in jobs:
            self._metrics.queue_seconds.observe(job.item.waited_s + now_s - job.submitted_s)

    def _next_step(self) -> list[_Job]:
        """What waits; waits for it where no step is under way. Empty if there is none, or the loop is to end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._stopping or self._under_way or len(self._batcher))
                taken = [] if self._stopping else self._batcher.take()
                jobs = [job for job in taken if job.done.set_running_or_notify_cancel()]
                if jobs or not taken:
                    return jobs

    def _refuse(self, jobs: list[_Job]) -> None:
        """Ends `jobs`, and all that waits, where they have not ended."""
        with self._changed:
            while jobs or (jobs := self._batcher.take()):
                _fail(jobs.pop(), self._refusal())

    def _refusal(self) -> UnavailableError:
        if self._lost:
            return UnavailableError(Reason.DEVICE_LOST, f"the service cannot encode any more: {self._lost}")
        return UnavailableError(Reason.SHUTTING_DOWN, "the service is shutting down")

    def _lose(self, why: str) -> None:
        with self._changed:
            self._lost, self._stopping = why, True

    def _begin(self, jobs: list[_Job]) -> None:
        """Launches a step of `jobs`. If that fails, each is tried alone, so that a bad one does not void the others."""
        now_s = perf_counter()
        self._metrics.step_items.observe(len(jobs))
        self.tick()
        try:
            step = self._launch([job.item for job in jobs])
        except Exception as error:  # whatever the model raises, the loop lives
            self._try_alone(jobs, error)
        else:
            self._under_way.append(_Launched(jobs, step, now_s))

    def _finish(self, launched: _Launched) -> None:
        jobs = launched.jobs
        self.tick()
        try:
            outcomes = launched.step.finish()
            if len(outcomes) != len(jobs):
                raise RuntimeError(f"the encoder returned {len(outcomes)} embeddings for {len(jobs)} items")
        except Exception as error:  # as above
            self._try_alone(jobs, error)
            return
        now_s = perf_counter()
        self._encode_seconds.observe(now_s - launched.since_s)
        if self._tracing is not None:
            self._trace(self._tracing, launched, outcomes, now_s)
        if self._publishers is not None:
            for job, outcome in zip(jobs, outcomes, strict=True):
                self._publishers.submit(lambda job, outcome: _end(job, self._published(job, outcome)), job, outcome)
            return
        ended = []
        for job, outcome in zip(jobs, outcomes, strict=True):
            self.tick()
            ended.append((job, self._published(job, outcome)))
        for job, refusal in ended:  # once all are published: who is told takes over, and this thread would wait
            _end(job, refusal)

    def _try_alone(self, jobs: list[_Job], error: Exception) -> None:
        with work_for(jobs[0].origin if len(jobs) == 1 else NOBODY):
            failure = self._failure("encoding", error)
        if len(jobs) == 1:
            _fail(jobs[0], failure)
            return
        for job in jobs:
            if self._lost:
                _fail(job, self._refusal())
                continue
            self._begin([job])
            while self._under_way:
                self._finish(self._under_way.popleft())

    def _published(self, job: _Job, outcome: torch.Tensor | ServiceError) -> ServiceError | None:
        """Publishes what came of an item; what it is refused with, if it is."""
        if isinstance(outcome, ServiceError):
            return outcome
        with work_for(job.origin):
            try:
                with self._metrics.time("publish"), span(self._tracing, "publish"):
                    self._publish(job.item, outcome)
            except ServiceError as error:
                return error
            except Exception as error:  # as above
                return self._failure("publishing", error)
        return None

    def _trace(
        self, tracing: Tracing, launched: _Launched, outcomes: Sequence[torch.Tensor | ServiceError], ended_s: float
    ) -> None:
        """A step is of several traces: each item's gets its part, with the step's number to tell who shared it."""
        self._num_traced += 1
        began_ns, ended_ns = from_perf_counter(launched.since_s), from_perf_counter(ended_s)
        ways: Sequence[dict[str, str]] = getattr(launched.step, "ways", ()) or [{}] * len(launched.jobs)
        for job, outcome, way in zip(launched.jobs, outcomes, ways, strict=True):
            tracing.record("queue", job.origin, from_perf_counter(job.submitted_s), began_ns)
            tracing.record(
                "step",
                job.origin,
                began_ns,
                ended_ns,
                failed=isinstance(outcome, ServiceError),
                step=self._num_traced,
                items=len(launched.jobs),
                rows=job.num_rows,
                modality=job.modality,
                **way,
            )

    def _failure(self, what: str, error: Exception) -> ServiceError:
        """What an unforeseen error is to an item. One of the device voids all that would follow."""
        logger.exception("%s failed", what)
        if isinstance(error, torch.AcceleratorError):
            self._lose(f"the device failed while {what}")
            return self._refusal()
        return InternalError(Reason.ENCODE_FAILED, f"{what} failed: {type(error).__name__}")


def _end(job: _Job, error: ServiceError | None) -> None:
    if error is not None:
        _fail(job, error)
    else:
        job.done.set_result(None)


def _fail(job: _Job, error: ServiceError) -> None:
    if not job.done.done():
        job.done.set_exception(error)
