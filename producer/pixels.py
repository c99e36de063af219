"""Compact pixels: an image of the Qwen-VL family as bytes, each patch once.

These models take a patch as a piece of video, and normalize pixels on the device. So what their processor makes of an
image, `pixel_values`, are the bytes of the resized image in another order, each patch `temporal_patch_size` times. A
preprocessing process cuts and sends each patch once (`cutter.py`); where the encoder runs it is repeated, here. The
model gets what vLLM's processor makes, bit for bit.
"""

from typing import Any, Final

import torch

PIXELS: Final = "pixel_values"
REPEATS: Final = "pixel_repeats"
"""The field of an item whose `PIXELS` [patches, channels, bytes] are compact: how often each patch is to be there."""


def expand(kwargs: dict[str, Any], *, takes_compact: bool = False) -> dict[str, Any]:
    """The model's keyword arguments: `kwargs`, which is changed, with pixels that are no longer compact.

    On a device this puts one kernel on the current stream, which reads the compact pixels wherever they lie. For a
    model that takes them compact nothing is repeated: `PIXELS` is then [patches, channels * bytes].
    """
    repeats = kwargs.pop(REPEATS, None)
    if repeats is not None:
        pixels = kwargs[PIXELS]
        kwargs[PIXELS] = (pixels if takes_compact else torch.cat([pixels] * repeats, 2)).flatten(1)
    return kwargs
