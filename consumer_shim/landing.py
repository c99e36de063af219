"""Where embeddings land: the region, the transports into it and the threads that pull."""

import logging
from concurrent.futures import ThreadPoolExecutor

from consumer_shim.client import Producer
from consumer_shim.config import ShimConfig
from consumer_shim.pull import Pull, Puller
from producer.memory.block_store import BlockStore
from producer.memory.region import SharedRegion
from producer.transport import nixl
from producer.transport.base import Reader, TransportError, TransportUnavailableError
from producer.transport.stream import StreamReader
from producer.wire.contract import GRPC_TRANSPORT

logger = logging.getLogger(__name__)

_INFO_TIMEOUT_S = 5.0


class Landing:
    """Owns the landing region, a client for each producer, and at most `max_pulls` threads."""

    def __init__(self, config: ShimConfig) -> None:
        self._config = config
        self.region = SharedRegion.create("ec-producer-shim", config.region_bytes)
        self.store = BlockStore(config.region_bytes)
        self._producers = {address: Producer(address) for address in config.producers}
        self._streams = {
            address: StreamReader(self.region, producer.stub.Fetch) for address, producer in self._producers.items()
        }
        self._nixl = self._open_nixl()
        self._chosen: dict[str, Reader] = {}  # by address
        self._puller = Puller(self.region, self.store, self._producers.__getitem__, self._reader)
        self._threads = ThreadPoolExecutor(config.max_pulls, thread_name_prefix="pull")

    def start(self, pull: Pull) -> None:
        """Has `pull` run on one of the threads."""
        self._threads.submit(self._puller.run, pull)

    def settle(self) -> None:
        """Frees memory that pulls past their deadline can write to no more."""
        self._puller.settle()

    def close(self) -> None:
        """Ends transports and threads; pulls in flight fail."""
        if self._nixl is not None:
            self._nixl.close()
        for producer in self._producers.values():
            producer.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.region.close()

    def _open_nixl(self) -> Reader | None:
        if self._config.transport == GRPC_TRANSPORT:
            return None
        try:
            return nixl.open_reader(self.region, self._config.nixl_devices)
        except (TransportUnavailableError, TransportError) as error:
            if self._config.transport == nixl.NAME:
                raise ValueError(f"transport is 'nixl': {error}") from None
            logger.info("NIXL is not used: %s", error)
            return None

    def _reader(self, address: str) -> Reader:
        """The transport for a producer: what was set, or the most capable one that both sides have."""
        reader = self._chosen.get(address)
        if reader is None:
            reader = self._chosen[address] = self._choose(address)
            logger.info("pulling from %s over %s", address, reader.name)
        return reader

    def _choose(self, address: str) -> Reader:
        if self._nixl is None:
            return self._streams[address]
        if self._config.transport == nixl.NAME:
            return self._nixl
        offered = self._producers[address].info(_INFO_TIMEOUT_S).transports
        return self._nixl if nixl.NAME in offered else self._streams[address]
