"""Which model's embeddings are taken."""

import grpc
import pytest

from consumer_shim.errors import ProducerError
from consumer_shim.fingerprint import FingerprintPin
from producer.wire.contract import Reason

ONE, OTHER = "1" * 64, "2" * 64


def test_any_by_default() -> None:
    pin = FingerprintPin()
    for found in (ONE, OTHER, ""):
        pin.check(found)
    assert pin.expected == ""


@pytest.mark.parametrize("learns", [True, False])
def test_only_the_one_that_is_set(learns: bool) -> None:
    pin = FingerprintPin(ONE, learns=learns)
    pin.check(ONE)
    said = f"the producer has fingerprint {OTHER}, this server takes {ONE}"
    with pytest.raises(ProducerError, match=said) as raised:
        pin.check(OTHER)
    assert raised.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert raised.value.reason == Reason.FINGERPRINT_MISMATCH
    assert pin.expected == ONE


def test_the_first_one_that_is_seen() -> None:
    pin = FingerprintPin(learns=True)
    pin.check("")  # says nothing
    assert pin.expected == ""
    pin.check(ONE)
    assert pin.expected == ONE
    with pytest.raises(ProducerError):
        pin.check(OTHER)
    pin.check(ONE)
