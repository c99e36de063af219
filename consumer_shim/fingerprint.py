"""Which model's embeddings a server takes: those of one fingerprint, however wide another's are."""

import threading

import grpc

from consumer_shim.errors import ProducerError
from producer.wire.contract import Reason


class FingerprintPin:
    """The fingerprint that producers must have: a setting's, or the first one's of several. Thread-safe."""

    def __init__(self, expected: str = "", *, learns: bool = False) -> None:
        """`expected` is 64 hex digits, or "" for any. With `learns`, any means the one that is seen first."""
        self._expected = expected
        self._learns = learns
        self._lock = threading.Lock()

    @property
    def expected(self) -> str:
        """What requests name, so that another producer refuses them itself; "" for any."""
        return self._expected

    def check(self, found: str) -> None:
        """Takes note of what a producer says of itself; "" says nothing.

        Raises:
            ProducerError: it is not the model whose embeddings are taken.
        """
        if not found:
            return
        with self._lock:
            if self._learns and not self._expected:
                self._expected = found
        if self._expected and found != self._expected:
            raise ProducerError(
                grpc.StatusCode.FAILED_PRECONDITION,
                Reason.FINGERPRINT_MISMATCH,
                f"the producer has fingerprint {found[:64]}, this server takes {self._expected}",
            )
