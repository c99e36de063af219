"""Media items → what vLLM's processors take, decoded as vLLM's own server decodes them."""

import io
import math
import wave
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO
from vllm.multimodal.video import get_video_loader_backend_for_processor
from vllm.transformers_utils.processor import get_video_processor_cls_name

from producer.core import DecodedForm, MediaItem

MODALITIES = ("image", "video", "audio")


class Decoder:
    """vLLM's decoders under one model's settings. Not thread-safe."""

    def __init__(self, model_config: ModelConfig) -> None:
        """
        Raises:
            ValueError: the settings for media decoding are not what vLLM takes, or do not bound a video's frames.
        """
        kwargs = {name: dict(values) for name, values in model_config.multimodal_config.media_io_kwargs.items()}
        image = ImageMediaIO(**kwargs.get("image", {}))
        video = kwargs.get("video", {})
        num_frames = video.get("num_frames", 1)
        if not isinstance(num_frames, int) or num_frames < 1:
            raise ValueError(f"media_io_kwargs: video.num_frames is {num_frames}; a video needs a bound")
        backend = get_video_loader_backend_for_processor(get_video_processor_cls_name(model_config))
        if backend and "video_backend" not in video:
            video["video_backend"] = backend
        try:
            self._load: dict[str, Callable[[bytes], Any]] = {
                "image": image.load_bytes,
                "video": VideoMediaIO(image, **video).load_bytes,
                "audio": AudioMediaIO(**kwargs.get("audio", {})).load_bytes,
            }
        except (TypeError, AssertionError) as error:
            raise ValueError(f"media_io_kwargs: {error}") from None

    def decode(self, item: MediaItem) -> Any:
        """The item as its modality's processor takes it. Raises whatever vLLM's decoders raise at hostile bytes."""
        if item.decoded is None:
            return self._load[item.modality](item.data)
        shape, rate_hz = item.decoded.shape, item.decoded.rate_hz
        data = bytearray(item.data)  # arrays that can be written to, as decoders return them
        if item.modality == "audio":
            return np.frombuffer(data, "<f4").reshape(shape), rate_hz
        pixels = np.frombuffer(data, np.uint8).reshape(shape)
        return Image.fromarray(pixels) if item.modality == "image" else (pixels, _video_metadata(shape[0], rate_hz))


def sample(modality: str) -> MediaItem:
    """A small item of `modality`, to try a model with: grey, or a second of near silence.

    Files, but for video: the libraries that read sound may be missing where a model could take it.
    """
    if modality == "video":
        shape = (6, 56, 84, 3)
        return MediaItem(
            modality=modality, data=bytes([128]) * math.prod(shape), decoded=DecodedForm(shape=shape, rate_hz=4)
        )
    buffer = io.BytesIO()
    if modality == "image":
        Image.new("RGB", (224, 196), "grey").save(buffer, "PNG")
    else:
        with wave.open(buffer, "wb") as file:
            file.setparams((1, 2, 16000, 16000, "NONE", ""))
            file.writeframes(np.ones(16000, "<i2").tobytes())
    return MediaItem(modality=modality, data=buffer.getvalue())


def _video_metadata(num_frames: int, rate_hz: float) -> dict[str, Any]:
    """What vLLM's decoders say of a video of which every frame was taken."""
    return {
        "fps": rate_hz,
        "duration": num_frames / rate_hz,
        "total_num_frames": num_frames,
        "frames_indices": list(range(num_frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
