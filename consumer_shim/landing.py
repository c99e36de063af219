"""Where embeddings land: the region, the transports into it and the threads that pull."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from consumer_shim.client import Producer
from consumer_shim.config import ShimConfig
from consumer_shim.fingerprint import FingerprintPin
from consumer_shim.logs import ShimLogger
from consumer_shim.pull import Ended, Pull, Puller
from producer.memory.block_store import BlockStore
from producer.memory.region import SharedRegion
from producer.transport import registry
from producer.transport.base import Reader, TransportError, TransportUnavailableError
from producer.transport.shm import ShmReader
from producer.transport.stream import StreamReader
from producer.wire.contract import GRPC_TRANSPORT, SHM_TRANSPORT
from producer.wire.tracing import Tracing

logger = ShimLogger(__name__)

_INFO_TIMEOUT_S = 5.0
_MAX_ENDED = 4096


class Landing:
    """Owns the landing region, a client for each producer, and at most `max_pulls` threads."""

    def __init__(self, config: ShimConfig, tracing: Tracing | None = None) -> None:
        self._config = config
        self.region = SharedRegion.create("ec-producer-shim", config.region_bytes)
        self.store = BlockStore(config.region_bytes)
        self._producers = {
            address: Producer(address, security=config.security, pin=FingerprintPin(config.fingerprint))
            for address in config.producers
        }
        self._streams = {
            address: StreamReader(self.region, producer.open_fetch) for address, producer in self._producers.items()
        }
        self._readers: dict[str, Reader | None] = {}  # by transport; None where it cannot be had
        self._opening = threading.Lock()
        if config.transport in registry.LIBRARY_TRANSPORTS:
            self._open(config.transport)
        self._shm = ShmReader(self.region)
        self._chosen: dict[str, Reader] = {}  # by address
        self.ended: deque[Ended] = deque(maxlen=_MAX_ENDED)
        """Pulls that are over, oldest first, for whoever counts them."""
        self._puller = Puller(
            self.region, self.store, self._producers.__getitem__, self._reader, tracing, self.ended.append
        )
        self._threads = ThreadPoolExecutor(config.max_pulls, thread_name_prefix="pull")

    def start(self, pull: Pull) -> None:
        """Has `pull` run on one of the threads."""
        self._threads.submit(self._run, pull)

    def settle(self) -> None:
        """Frees memory that pulls past their deadline can write to no more."""
        self._puller.settle()

    def close(self) -> None:
        """Ends transports and threads; pulls in flight fail."""
        self._close_readers()
        for producer in self._producers.values():
            producer.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._close_readers()  # a pull may have opened one meanwhile
        self._shm.close()
        self.region.close()

    def _run(self, pull: Pull) -> None:
        self._puller.run(pull)
        if pull.failure is not None:
            self._chosen.pop(pull.ticket.address, None)  # what is there next time may offer something else

    def _reader(self, address: str) -> Reader:
        """The transport for a producer: what was set, or the most capable one that both sides have."""
        reader = self._chosen.get(address)
        if reader is None:
            reader = self._chosen[address] = self._choose(address)
            logger.info("pulling from %s over %s", address, reader.name)
        return reader

    def _choose(self, address: str) -> Reader:
        wanted = self._config.transport
        own = {SHM_TRANSPORT: self._shm, GRPC_TRANSPORT: self._streams[address]}
        if wanted != "auto":
            return own.get(wanted) or self._open(wanted) or own[GRPC_TRANSPORT]
        info = self._producers[address].info(_INFO_TIMEOUT_S)
        if self._shm.reaches(info.shared_memory):
            return self._shm
        readers = (self._open(name) for name in registry.LIBRARY_TRANSPORTS if name in info.transports)
        return next((reader for reader in readers if reader is not None), own[GRPC_TRANSPORT])

    def _open(self, name: str) -> Reader | None:
        """The reader of transport `name`, started at the first call; None where it cannot be had.

        Raises:
            ValueError: it cannot be had, and was asked for by name.
        """
        with self._opening:
            if name not in self._readers:
                try:
                    self._readers[name] = registry.open_reader(name, self.region, self._config.transport_options[name])
                except (TransportUnavailableError, TransportError) as error:
                    if self._config.transport == name:
                        raise ValueError(f"transport is {name!r}: {error}") from None
                    logger.info("%s is not used: %s", name, error)
                    self._readers[name] = None
            return self._readers[name]

    def _close_readers(self) -> None:
        with self._opening:
            for reader in self._readers.values():
                if reader is not None:
                    reader.close()
            self._readers.clear()
