"""Media files → model inputs, in a pool of processes off the event loop.

A codec that crashes, hangs or takes too much memory costs its file and one process, which is replaced; other files and
the service go on.
"""

import asyncio
import logging
from collections.abc import Mapping
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
    """Owns the processes. All methods are for the event loop's thread."""

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
            metrics: where its time, and the processes, are counted.
        """
        from producer import preprocess_worker
        from producer.media_limits import MediaLimits

        self._max_rows = max_rows
        self._timeout_s = timeout_s
        self._pool = WorkerPool(
            num_workers,
            preprocess_worker.make,
            (model_config, dict(forms), limits or MediaLimits()),
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

    async def prepare(self, key: str, item: MediaItem) -> PreparedItem:
        """The encoder's inputs for `item`.

        Raises:
            InvalidItemError: the file cannot be decoded, or takes too many rows, too long or too much memory, or
                crashes the decoder.
            InternalError: the processes died over it by another cause, or preprocessing failed in an unforeseen way.
            UnavailableError: no process starts, or all of them were ended.
        """
        from producer import preprocess_worker

        if why := self.down_reason():
            raise UnavailableError(Reason.WORKER_DIED, f"preprocessing is down: {why}")
        try:
            answer, waited_s = await self._ask(preprocess_worker.request(item))
            prepared = preprocess_worker.prepared(answer)
        except preprocess_worker.MediaError as error:
            raise InvalidItemError(error.reason, str(error)) from None
        except Exception as error:
            raise self._service_error(item, error) from error
        if prepared.num_rows > self._max_rows:
            raise InvalidItemError(
                Reason.MEDIA_TOO_LARGE,
                f"the {item.modality} needs {prepared.num_rows} rows; at most {self._max_rows} are allowed",
            )
        return PreparedItem(
            key=key,
            modality=item.modality,
            mm_hash=prepared.mm_hash,
            num_rows=prepared.num_rows,
            content_part=prepared.content_part,
            inputs=prepared.inputs,
            waited_s=waited_s,
        )

    def close(self) -> None:
        """Ends the processes; files in hand are refused."""
        self._pool.close()

    async def _ask(self, request: Message) -> tuple[Message, float]:
        """A process's answer, and the seconds until one took the request."""
        submitted_s = perf_counter()
        future = self._pool.submit(request)
        try:
            answer = await asyncio.wrap_future(future)
        finally:
            if future.begun_s is not None:
                self._seconds.observe(perf_counter() - future.begun_s)
        assert future.begun_s is not None
        return answer, future.begun_s - submitted_s

    def _service_error(self, item: MediaItem, error: Exception) -> ServiceError:
        """The one outcome of an item that the pool did not do."""
        match error:
            case WorkerTimeoutError():
                return InvalidItemError(
                    Reason.MEDIA_TOO_SLOW,
                    f"the {item.modality} took more than {self._timeout_s:g} s to decode and preprocess",
                )
            case WorkerDiedError(crashed=True):
                return InvalidItemError(
                    Reason.MEDIA_CRASHES_DECODER,
                    f"the process that decoded this {item.modality} died, twice; the file is refused",
                )
            case WorkerDiedError():
                return InternalError(Reason.WORKER_DIED, "the process that preprocessed this item died")
            case PoolClosedError():
                return UnavailableError(Reason.SHUTTING_DOWN, "the service shut down before the item was preprocessed")
        logger.error("preprocessing failed: %s", stack_of(error))  # its text may be of the file
        kind = str(error) if isinstance(error, WorkError) else type(error).__name__
        return InternalError(Reason.ENCODE_FAILED, f"preprocessing failed: {kind}")
