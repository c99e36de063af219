"""Media files → model inputs, in a pool of processes off the event loop.

A codec that crashes, hangs or takes too much memory costs its file and one process, which is replaced; other files and
the service go on.
"""

import asyncio
import functools
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING, Any

from producer.core import MediaItem, PreparedItem
from producer.errors import InternalError, InvalidItemError, ServiceError, UnavailableError
from producer.logs import stack_of
from producer.metrics import Metrics
from producer.wire.contract import Reason
from producer.worker_main import Message
from producer.worker_pool import WorkerDiedError, WorkerPool, WorkError
from producer.worker_process import PoolClosedError, WorkerTimeoutError

if TYPE_CHECKING:
    from producer.media_limits import MediaLimits

logger = logging.getLogger(__name__)


class Preprocessor:
    """Owns the processes. Thread-safe."""

    def __init__(
        self,
        model_config: Any,
        forms: Mapping[str, str],
        num_workers: int,
        *,
        max_rows: int,
        timeout_s: float = 30.0,
        memory_bytes: int = 4 << 30,
        limits: "MediaLimits | None" = None,
        hashes: bool = True,
        metrics: Metrics,
    ) -> None:
        """A pool of `num_workers` processes for `model_config`, not started yet.

        Args:
            model_config: vLLM's.
            forms: by modality, the form of the content part that stands for an item.
            num_workers: processes.
            max_rows: the largest embedding; items of more rows are refused.
            timeout_s: what an item may take in a process.
            memory_bytes: what an item may take of a process's memory.
            limits: what a file may have; by default what fits into the default memory.
            hashes: whether anybody wants vLLM's hash of an item.
            metrics: where its time, and the processes, are counted.
        """
        from producer import preprocess_worker
        from producer.media_limits import MediaLimits

        self._max_rows = max_rows
        self._timeout_s = timeout_s
        self._pool = WorkerPool(
            num_workers,
            preprocess_worker.make,
            (model_config, dict(forms), limits or MediaLimits(), hashes),
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            preload=preprocess_worker.modules(model_config),
        )
        self._seconds = metrics.stage_seconds.labels("preprocess")
        metrics.preprocess_workers.set_function(lambda: len(self._pool.pids))
        metrics.preprocess_deaths.set_function(lambda: self._pool.num_deaths)

    @property
    def pids(self) -> set[int]:
        """Process ids of the processes that are ready, for tests and diagnosis."""
        return self._pool.pids

    def start(self) -> None:
        """Has the processes start now rather than at the first item; does not wait for them."""
        self._pool.start()

    def down_reason(self) -> str | None:
        """Why nothing can be preprocessed, once no process has been ready for too long; else None."""
        return self._pool.down_reason()

    def submit(self, key: str, item: MediaItem) -> "Future[PreparedItem]":
        """The encoder's inputs for `item`. The future ends on another thread; cancelled in time, nothing is done.

        Its errors are:
            InvalidItemError: the file cannot be decoded, or takes too many rows, too long or too much memory, or
                crashes the decoder.
            InternalError: the processes died over it by another cause, or preprocessing failed in an unforeseen way.
            UnavailableError: no process starts, or all of them were ended; raised here, too.
        """
        from producer import preprocess_worker

        if why := self.down_reason():
            raise UnavailableError(Reason.WORKER_DIED, f"preprocessing is down: {why}")
        finish = functools.partial(self._finish, key, item.modality, perf_counter())
        try:
            return self._pool.submit(preprocess_worker.request(item), finish)
        except PoolClosedError as error:
            raise self._service_error(item.modality, error) from None

    async def prepare(self, key: str, item: MediaItem) -> PreparedItem:
        """As `submit`, for who waits for it on an event loop."""
        return await asyncio.wrap_future(self.submit(key, item))

    def close(self) -> None:
        """Ends the processes; files in hand are refused."""
        self._pool.close()

    def _finish(
        self, key: str, modality: str, submitted_s: float, outcome: Message | Exception, begun_s: float | None
    ) -> PreparedItem:
        """On a thread of the pool: what has become of an item."""
        from producer import preprocess_worker

        waited_s = 0.0
        if begun_s is not None:
            waited_s = begun_s - submitted_s
            self._seconds.observe(perf_counter() - begun_s)
        try:
            if isinstance(outcome, Exception):
                raise outcome
            prepared = preprocess_worker.prepared(outcome)
        except preprocess_worker.MediaError as error:
            raise InvalidItemError(error.reason, str(error)) from None
        except Exception as error:
            raise self._service_error(modality, error) from error
        if prepared.num_rows > self._max_rows:
            raise InvalidItemError(
                Reason.MEDIA_TOO_LARGE,
                f"the {modality} needs {prepared.num_rows} rows; at most {self._max_rows} are allowed",
            )
        return PreparedItem(
            key=key,
            modality=modality,
            mm_hash=prepared.mm_hash,
            num_rows=prepared.num_rows,
            content_part=prepared.content_part,
            inputs=prepared.inputs,
            waited_s=waited_s,
        )

    def _service_error(self, modality: str, error: Exception) -> ServiceError:
        """The one outcome of an item that the pool did not do."""
        match error:
            case WorkerTimeoutError():
                return InvalidItemError(
                    Reason.MEDIA_TOO_SLOW,
                    f"the {modality} took more than {self._timeout_s:g} s to decode and preprocess",
                )
            case WorkerDiedError(crashed=True):
                return InvalidItemError(
                    Reason.MEDIA_CRASHES_DECODER,
                    f"the process that decoded this {modality} died, twice; the file is refused",
                )
            case WorkerDiedError():
                return InternalError(Reason.WORKER_DIED, "the process that preprocessed this item died")
            case PoolClosedError():
                return UnavailableError(Reason.SHUTTING_DOWN, "the service shut down before the item was preprocessed")
        logger.error("preprocessing failed: %s", stack_of(error))  # its text may be of the file
        kind = str(error) if isinstance(error, WorkError) else type(error).__name__
        return InternalError(Reason.ENCODE_FAILED, f"preprocessing failed: {kind}")
