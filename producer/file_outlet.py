"""Files for a stock vLLM consumer: what its `ECExampleConnector` reads from a shared folder, kept within bounds.

FOLDER/NAME/encoder_cache.safetensors, with NAME once vLLM's own hash of the media (for requests that bring them) and
once the content key (for requests with metadata and that uuid). A file appears whole or not at all.
"""

import asyncio
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from producer.core import Lease
from producer.embedding_pool import EmbeddingPool
from producer.safetensors_file import pack
from producer.wire.block import HEADER_BYTES

_FILE = "encoder_cache.safetensors"
_TENSOR = "ec_cache"


class FileOutlet:
    """Owns the files in `folder`: those that it finds there count, and go first. Any thread may call it."""

    def __init__(
        self,
        folder: Path,
        pool: EmbeddingPool,
        *,
        max_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Keeps at most `max_bytes` of files, each at most `max_age_s` seconds from its last use.

        Raises:
            OSError: `folder` cannot be made or read.
        """
        self._folder = folder
        self._pool = pool
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted((path.stat().st_mtime, path) for path in folder.glob(f"*/{_FILE}"))
        self._files = OrderedDict((path.parent.name, (used_s, path.stat().st_size)) for used_s, path in found)

    async def ensure(self, lease: Lease) -> None:
        """Returns once the files of a leased embedding are there.

        Raises:
            OSError: they cannot be written.
        """
        await asyncio.to_thread(self._ensure, lease)

    def expire(self) -> None:
        """Removes what nobody has asked for in time, and what is too much."""
        with self._lock:
            self._prune(0)

    def _ensure(self, lease: Lease) -> None:
        with self._lock:
            for name in filter(None, (lease.info.mm_hash, lease.key)):
                if name not in self._files or not (self._folder / name / _FILE).exists():
                    self._write(name, lease)
                self._files[name] = (self._clock(), self._files[name][1])
                self._files.move_to_end(name)

    def _write(self, name: str, lease: Lease) -> None:
        shape = lease.info.shape
        with self._pool.open_block(lease.lease_id) as block:
            data = pack(_TENSOR, shape, block[HEADER_BYTES : HEADER_BYTES + shape.payload_bytes])
        self._prune(len(data))
        place = self._folder / name
        place.mkdir(exist_ok=True)
        draft = place / f".{os.getpid()}"
        draft.write_bytes(data)
        draft.replace(place / _FILE)
        self._files[name] = (self._clock(), len(data))

    def _prune(self, needed_bytes: int) -> None:
        total = needed_bytes + sum(size for _, size in self._files.values())
        oldest_s = self._clock() - self._max_age_s
        while self._files:
            name, (used_s, size) = next(iter(self._files.items()))
            if total <= self._max_bytes and used_s >= oldest_s:
                return
            shutil.rmtree(self._folder / name, ignore_errors=True)
            del self._files[name]
            total -= size
