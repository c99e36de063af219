"""Media files → model inputs, in a pool of processes off the event loop.

A codec that crashes takes its process down, not the service: the pool is started again and the file is refused.
"""

import asyncio
import logging
import multiprocessing
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from producer.core import MediaItem, PreparedItem
from producer.errors import InternalError, InvalidItemError
from producer.wire.contract import Reason

logger = logging.getLogger(__name__)

_WORKER = "producer.preprocess_worker"
_ATTEMPTS = 2
"""A file whose process died is tried once more, since another file may have killed it."""


class Preprocessor:
    """Owns the processes. All methods are for the event loop's thread."""

    def __init__(self, model_config: Any, forms: Mapping[str, str], num_workers: int, *, max_rows: int) -> None:
        """A pool of `num_workers` processes for `model_config`; items of more than `max_rows` rows are refused.

        Args:
            model_config: vLLM's.
            forms: by modality, the form of the content part that stands for an item.
            num_workers: processes.
            max_rows: the largest embedding.
        """
        self._model_config = model_config
        self._forms = forms
        self._num_workers = num_workers
        self._max_rows = max_rows
        # The fork server is a clean process of one thread; each worker is a fork of it, so imports are paid once.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_WORKER])
        self._pool = self._start_pool()

    def start(self) -> None:
        """Has a process start now rather than at the first item; does not wait for it."""
        from producer import preprocess_worker

        # The pool waits for the fork server's imports, seconds in which the model can be loaded.
        threading.Thread(target=self._pool.submit, args=(preprocess_worker.is_ready,), daemon=True).start()

    async def prepare(self, key: str, item: MediaItem) -> PreparedItem:
        """The encoder's inputs for `item`.

        Raises:
            InvalidItemError: the file cannot be decoded, or has too many rows.
            InternalError: the processes died over it, or preprocessing failed in an unforeseen way.
        """
        from producer import preprocess_worker

        try:
            prepared = await self._run(preprocess_worker.prepare, item)
        except preprocess_worker.MediaError as error:
            raise InvalidItemError(Reason.MEDIA_UNREADABLE, str(error)) from None
        except BrokenProcessPool:
            raise InternalError(Reason.WORKER_DIED, "the process that preprocessed this item died") from None
        except Exception as error:
            logger.exception("preprocessing failed")
            raise InternalError(Reason.ENCODE_FAILED, f"preprocessing failed: {type(error).__name__}") from error
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
        )

    def close(self) -> None:
        """Ends the processes; files in hand are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Any, *args: Any) -> Any:
        for attempt in range(_ATTEMPTS):
            pool = self._pool
            try:
                return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
            except BrokenProcessPool:
                self._replace(pool)
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _replace(self, broken: ProcessPoolExecutor) -> None:
        """Starts a new pool, unless another file's failure has done so."""
        if self._pool is broken:
            logger.error("a preprocessing process died; starting the pool again")
            self._pool = self._start_pool()
            broken.shutdown(wait=False)

    def _start_pool(self) -> ProcessPoolExecutor:
        from producer import preprocess_worker

        return ProcessPoolExecutor(
            self._num_workers,
            mp_context=self._context,
            initializer=preprocess_worker.start,
            initargs=(self._model_config, self._forms),
        )
