"""What an item must be before anything is computed from it. Pure."""

import math
import re

from producer.core import DecodedForm, MediaItem
from producer.errors import InvalidItemError
from producer.wire.contract import Reason

_DECODED = {"image": (3, 1), "video": (4, 1), "audio": (1, 4)}
"""Dimensions and bytes of an element of what a client decoded, by modality."""
_RATES_HZ = {"video": (0.001, 1000.0), "audio": (1000.0, 384_000.0)}
_MAX_FRAMES = 768
_MAX_AUDIO_S = 600
_URL = re.compile(rb"\s*(https?|ftp|file|s3|gs|data):", re.IGNORECASE)


class ItemChecks:
    """The limits of one producer."""

    def __init__(self, *, modalities: tuple[str, ...], max_item_bytes: int) -> None:
        self._modalities = modalities
        self._max_item_bytes = max_item_bytes

    def check(self, item: MediaItem) -> None:
        """Raises InvalidItemError, with a stable reason, for what no encode can come of."""
        if item.modality not in self._modalities:
            raise InvalidItemError(
                Reason.UNSUPPORTED_MODALITY, f"modality {item.modality} is not served; {', '.join(self._modalities)} is"
            )
        if not item.data:
            raise InvalidItemError(Reason.MEDIA_EMPTY, "the item has no data")
        if item.decoded is not None:
            _check_decoded(item, item.decoded)
        elif _URL.match(item.data):
            raise InvalidItemError(Reason.MEDIA_REFUSED, "the item is a URL; media arrive as bytes, nothing is fetched")
        if len(item.data) > self._max_item_bytes:
            raise InvalidItemError(
                Reason.MEDIA_TOO_LARGE,
                f"the item has {len(item.data)} bytes; at most {self._max_item_bytes} are allowed",
            )


def _check_decoded(item: MediaItem, form: DecodedForm) -> None:
    """Refuses a form that the bytes do not have, or no device makes, before anything is computed from it."""
    dimensions, element_bytes = _DECODED[item.modality]
    has_form = len(form.shape) == dimensions and (dimensions == 1 or form.shape[-1] == 3)
    if not has_form or math.prod(form.shape) * element_bytes != len(item.data):
        shape = "x".join(map(str, form.shape[:8]))
        raise InvalidItemError(
            Reason.MEDIA_UNREADABLE, f"a decoded {item.modality} of shape {shape} does not have {len(item.data)} bytes"
        )
    if item.modality == "image":
        return
    low, high = _RATES_HZ[item.modality]
    if not low <= form.rate_hz <= high:
        raise InvalidItemError(
            Reason.MEDIA_UNREADABLE, f"rate_hz of the {item.modality} is {form.rate_hz}; allowed are {low} to {high}"
        )
    most = _MAX_FRAMES if item.modality == "video" else int(_MAX_AUDIO_S * form.rate_hz)
    if form.shape[0] > most:
        raise InvalidItemError(
            Reason.MEDIA_TOO_LARGE, f"the {item.modality} has {form.shape[0]} frames or samples; allowed are {most}"
        )
