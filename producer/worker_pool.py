"""Processes that do tasks which may crash, hang or take too much memory. What happens to one concerns only its task.

A thread for each process gives it one task at a time and replaces it when it dies, is stopped or takes too long. A task
whose process died is tried once more, in a new process that has done nothing else.
"""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from producer.wire.origin import work_for
from producer.worker_main import CRASHES, Message, Work
from producer.worker_process import POLL_S, Launcher, PoolClosedError, Worker, WorkerLostError, WorkerTimeoutError

logger = logging.getLogger(__name__)


_ATTEMPTS = 2
_BACKOFF_S = (0.1, 0.5, 2.0, 5.0)
_CLOSE_S = 5.0
_DOWN_S = 8.0
"""Without a process for longer than this, the pool is down; the first one may take `start_timeout_s`."""
_CRASHES = {number.name for number in CRASHES}


class WorkerDiedError(Exception):
    """The processes that tried the task died; `crashed` says that each did so by itself, as often as is tried."""

    def __init__(self, endings: Sequence[str]) -> None:
        super().__init__(f"the processes that tried it ended with {' and '.join(endings)}")
        self.crashed = len(endings) == _ATTEMPTS and all(ending in _CRASHES for ending in endings)


class WorkError(Exception):
    """The work raised an exception of this name."""


class TaskFuture(Future[Any]):
    """The future outcome of a task."""

    begun_s: float | None = None
    """When a process took the task, by `time.perf_counter`; None before."""


@dataclass(frozen=True, slots=True)
class _Task:
    future: TaskFuture
    request: Message
    finish: Callable[[Message | Exception, float | None], Any]
    endings: list[str] = field(default_factory=list)  # of the processes that died over it

    def settle(self, outcome: Message | Exception) -> None:
        """Ends it, on the thread that saw its end."""
        with work_for(self.request.origin):
            try:
                result = self.finish(outcome, self.future.begun_s)
            except Exception as error:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)


def _as_it_is(outcome: Message | Exception, begun_s: float | None) -> Message:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class WorkerPool:
    """Owns the processes and their threads. Thread-safe.

    It takes as many tasks as it is given: who submits them bounds how many there are.
    """

    def __init__(
        self,
        num_workers: int,
        make: Callable[..., Work],
        args: Sequence[Any] = (),
        *,
        timeout_s: float,
        memory_bytes: int,
        preload: Sequence[str] = (),
        start_timeout_s: float = 300.0,
    ) -> None:
        """Nothing is started yet.

        Args:
            num_workers: processes.
            make: called with `args` in each process; returns what does a task there.
            args: pickled for each process.
            timeout_s: what a task may take in a process. It is noticed within a second, and the process is ended.
            memory_bytes: what a task may allocate in its process, and the size of its answer.
            preload: modules that are imported once, before processes are forked.
            start_timeout_s: what the fork server, and then a process, may take to start.
        """
        self._launcher = Launcher(
            make,
            args,
            memory_bytes=memory_bytes,
            preload=preload,
            start_timeout_s=start_timeout_s,
            is_closed=lambda: self._closed,
        )
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._condition = threading.Condition()
        self._waiting: dict[Future[Any], _Task] = {}  # in the order in which they came
        self._threads: list[threading.Thread] = []
        self._ready: set[Worker] = set()
        self._was_ready = False
        self._none_since_s = 0.0
        self._trouble = "none has started yet"
        self._closed = False
        self.num_deaths = 0
        """Processes that ended unasked, were stopped, or were ended since they hung."""

    @property
    def pids(self) -> set[int]:
        """Process ids of the workers that are ready, for tests and diagnosis."""
        with self._condition:
            return {worker.pid for worker in self._ready}

    def start(self) -> None:
        """Has the processes start; does not wait for them."""
        with self._condition:
            if self._threads or self._closed:
                return
            self._none_since_s = time.monotonic()
            for index in range(self._num_workers):
                thread = threading.Thread(target=self._attend, name=f"worker-{index}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def submit(
        self, request: Message, finish: Callable[[Message | Exception, float | None], Any] = _as_it_is
    ) -> TaskFuture:
        """The future outcome of `request`: what `finish` makes, or raises, of the answer and of when it was begun.

        One that is cancelled before it has begun is dropped; one that has begun goes on, at most until its timeout.
        `finish` is called on the thread that saw the end. In place of an answer it may get WorkerDiedError,
        WorkerTimeoutError, WorkError and PoolClosedError, which is raised here, too; by default it raises them.
        """
        self.start()
        future = TaskFuture()
        with self._condition:
            if self._closed:
                raise PoolClosedError("the pool is closed")
            self._waiting[future] = _Task(future, request, finish)
            self._condition.notify()
        future.add_done_callback(self._forget)
        return future

    def down_reason(self) -> str | None:
        """Why nothing can be done, if no process has been ready for long; else None."""
        with self._condition:
            if self._ready or self._closed or not self._threads:
                return None
            seconds = time.monotonic() - self._none_since_s
            if seconds <= (_DOWN_S if self._was_ready else self._start_timeout_s):
                return None
            return f"no worker has been ready for {seconds:.0f} s; the last one: {self._trouble}"

    def close(self) -> None:
        """Ends the processes, also those that hang or are stopped; tasks in hand fail. Takes some seconds at most."""
        with self._condition:
            self._closed = True
            tasks = list(self._waiting.values())
            self._condition.notify_all()
        for task in tasks:
            if task.future.set_running_or_notify_cancel():
                task.settle(PoolClosedError("the pool was closed"))
        until_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _forget(self, future: "Future[Any]") -> None:
        with self._condition:
            self._waiting.pop(future, None)

    def _attend(self) -> None:
        """One of the threads: keeps a process alive and gives it tasks."""
        task: _Task | None = None
        num_failures = 0
        while not self._closed:
            worker = self._launch()
            if worker is not None:
                task = self._employ(worker, task)
                num_failures = 0
                continue
            if task is not None and not self._closed:
                task.settle(WorkerDiedError(task.endings))
                task = None
            with self._condition:
                self._condition.wait_for(lambda: self._closed, _BACKOFF_S[min(num_failures, len(_BACKOFF_S) - 1)])
            num_failures += 1
        if task is not None:
            task.settle(PoolClosedError("the pool was closed"))

    def _launch(self) -> Worker | None:
        try:
            return Worker(self._launcher)
        except PoolClosedError:
            return None
        except Exception as error:  # whatever it is, this thread has to go on
            self._trouble = f"it did not start: {error}"
            logger.error("a worker did not start", exc_info=not isinstance(error, WorkerLostError | WorkerTimeoutError))
            return None

    def _employ(self, worker: Worker, task: _Task | None) -> _Task | None:
        """Gives `worker` tasks, `task` first, until it has to be replaced. Returns a task that is to be tried again."""
        with self._condition:
            self._ready.add(worker)
            self._was_ready = True
        try:
            while task is not None or (task := self._take(worker)) is not None:
                if not self._do(worker, task):
                    break
                task = None
        finally:
            with self._condition:
                self._ready.discard(worker)
                self._none_since_s = time.monotonic()
            ending = _describe(worker.end())
            self._trouble = f"it ended with {ending}"
        if task is None or task.future.done():
            return None
        task.endings.append(ending)
        if len(task.endings) < _ATTEMPTS:
            return task
        task.settle(WorkerDiedError(task.endings))
        return None

    def _do(self, worker: Worker, task: _Task) -> bool:
        """Whether `worker` can go on. A task that is not done then has cost it its life."""
        try:
            answer = worker.ask(task.request, self._timeout_s)
        except WorkerLostError as error:
            with work_for(task.request.origin):
                logger.error("a worker was lost over a task: %s", error)
            self._count_death()
            return False
        except Exception as error:
            if isinstance(error, WorkerTimeoutError):
                self._count_death()
            task.settle(error)
            return False
        task.settle(WorkError(answer.error) if answer.error else answer)
        return not answer.last

    def _take(self, worker: Worker) -> _Task | None:
        """The next task; None once the pool is closed or `worker` has to be replaced."""
        with self._condition:
            while not self._closed:
                try:
                    if not worker.is_idle:
                        raise WorkerLostError("it died")
                    if self._waiting:
                        task = self._waiting.pop(next(iter(self._waiting)))
                        if task.future.set_running_or_notify_cancel():
                            task.future.begun_s = time.perf_counter()
                            return task
                    elif not self._condition.wait(POLL_S):
                        worker.check_runs()
                except WorkerLostError as error:
                    logger.error("a worker was lost while it had nothing to do: %s", error)
                    self._count_death()
                    self._condition.notify()  # another thread may take the task that woke this one
                    return None
        return None

    def _count_death(self) -> None:
        with self._condition:
            self.num_deaths += 1


def _describe(exit_code: int) -> str:
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-exit_code).name
    return f"status {exit_code}"
