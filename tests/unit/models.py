"""vLLM's view of the tiny models, and the kit's media as items. Importing vLLM takes seconds, so it is done late."""

import base64
import io
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from producer.core import DecodedForm, MediaItem
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.media import Media


def model_config(family: str, **settings: Any) -> Any:
    """As the producer makes it, with `mm_processor_kwargs` and `media_io_kwargs` in `settings`."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(cached_checkpoint(family)), mm_encoder_only=True, **settings).create_model_config()


def file_item(media: Media) -> MediaItem:
    return MediaItem(modality=media.modality, data=media.data)


def decoded_item(modality: str, values: NDArray[Any], rate_hz: float = 0.0) -> MediaItem:
    """What a client sends that has decoded its media."""
    form = DecodedForm(shape=values.shape, rate_hz=rate_hz)
    return MediaItem(modality=modality, data=values.tobytes(), decoded=form)


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    """A picture as a client decodes it."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def unsaved(text: str) -> torch.Tensor:
    """The tensor in a content part."""
    loaded = torch.load(io.BytesIO(base64.b64decode(text, validate=True)), weights_only=True)
    assert isinstance(loaded, torch.Tensor)
    return loaded


def inputs_of(processor: Any, modality: str, media: Any) -> dict[str, torch.Tensor]:
    """What the encoder gets of an item, by the field's name."""
    data = processor.process(modality, media).kwargs.get_data()
    return {name: torch.as_tensor(value) for name, value in data.items()}


def arrived(frames: Any) -> dict[str, torch.Tensor]:
    """What the encoder gets of an item, from what a preprocessing process sent."""
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.serial_utils import MsgpackDecoder

    from producer.pixels import expand

    data = expand(MsgpackDecoder(MultiModalKwargsItem).decode(frames).get_data())
    return {name: torch.as_tensor(value) for name, value in data.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether they are the same inputs, bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
