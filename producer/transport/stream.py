"""gRPC bytes, the transport that is always there: `Fetch` streams the block over the control connection."""

from collections.abc import Callable
from typing import Any

import grpc

from producer.memory.region import SharedRegion
from producer.transport.base import BlockDescriptor, Endpoint, Outlet, Reader, TransportError
from producer.wire.contract import GRPC_TRANSPORT
from producer.wire.pb import encoder_cache_pb2 as pb


class StreamOutlet(Outlet):
    """The lease is all that a reader needs, since `Fetch` serves the block itself."""

    name = GRPC_TRANSPORT

    def describe(self) -> Endpoint:
        return Endpoint(base=None, peer="", metadata=b"")

    @property
    def is_up(self) -> bool:
        return True

    def close(self) -> None:
        return


class StreamReader(Reader):
    """Reads with `Fetch`; nothing is written after it returns, so every failure is settled."""

    name = GRPC_TRANSPORT

    def __init__(self, region: SharedRegion, fetch: Callable[..., Any]) -> None:
        """`fetch` is a stub's `Fetch`, bound to the producer that the blocks lie at."""
        self._region = region
        self._fetch = fetch

    def read(self, block: BlockDescriptor, offset: int, timeout_s: float) -> None:
        end = offset + block.num_bytes
        call = self._fetch(pb.FetchRequest(lease_id=block.lease_id), timeout=timeout_s)
        try:
            for part in call:
                if offset + len(part.data) > end:
                    raise TransportError(f"the producer sent more than the block's {block.num_bytes} bytes")
                self._region.view[offset : offset + len(part.data)] = part.data
                offset += len(part.data)
        except grpc.RpcError as error:
            timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            raise TransportError(f"{error.code().name}: {error.details()}", timed_out=timed_out) from None
        finally:
            call.cancel()
        if offset != end:
            raise TransportError(f"the producer sent {block.num_bytes - (end - offset)} of {block.num_bytes} bytes")

    def is_settled(self, offset: int) -> bool:
        return True

    def close(self) -> None:
        return
