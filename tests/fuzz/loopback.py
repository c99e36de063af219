"""gRPC as it is, over loopback: a producer that answers what it is told, and calls of raw bytes."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc

from producer.wire.contract import SERVICE_NAME


class LoopThread:
    """An event loop in a thread of its own, which ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Any) -> Any:
        """What a coroutine returns, or raises."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


class Answerer:
    """A producer whose answer to each method's request, both serialised, is a function's."""

    def __init__(self, answers: dict[str, Callable[[bytes], bytes]]) -> None:
        """A function may raise `Refusal`."""
        self._answers = answers
        self.thread = LoopThread()
        self.address = self.thread.run(self._start())

    async def _start(self) -> str:
        self._server = grpc.aio.server()
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._handler(name)) for name in self._answers}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    def _handler(self, name: str) -> Any:
        async def handle(request: bytes, context: Any) -> bytes:
            try:
                return self._answers[name](request)
            except Refusal as refusal:
                await context.abort(refusal.code, "it failed", (("grpc-status-details-bin", refusal.details),))
                raise

        return handle


class Refusal(Exception):
    """Ends a call with a code and the bytes of its details."""

    def __init__(self, code: grpc.StatusCode, details: bytes) -> None:
        super().__init__(code)
        self.code = code
        self.details = details
