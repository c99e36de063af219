"""Media items → what vLLM's processors take, decoded as vLLM's own server decodes them, within limits."""

import io
import math
import re
import wave
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO
from vllm.multimodal.video import get_video_loader_backend_for_processor
from vllm.transformers_utils.processor import get_video_processor_cls_name

from producer.core import DecodedForm, MediaItem
from producer.media_limits import MediaLimits, MediaTooLargeError, no_protocols, refuse_traps

_SIZE = (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
MODALITIES = ("image", "video", "audio")
_NOISE = re.compile(
    r"Failed to load image: |Error opening <[^>]*>: | Set VLLM_\w+ to increase this limit\.|^b(?=['\"])"
)
"""What their senders cannot use of vLLM's and the decoders' sentences."""
_PLAIN = {
    "cannot identify image file": "it is in no format that is read",
    "invalid literal for int": "a number in its header is none",
    "Could not open video stream": "it is no video, or one in no format that is read",
}


class Decoder:
    """vLLM's decoders under one model's settings. Not thread-safe; the process should decode nothing else meanwhile."""

    def __init__(self, model_config: ModelConfig, limits: MediaLimits | None = None) -> None:
        """
        Raises:
            ValueError: the settings for media decoding are not what vLLM takes, or do not bound a video's frames.
        """
        self._limits = limits or MediaLimits()
        kwargs = {name: dict(values) for name, values in model_config.multimodal_config.media_io_kwargs.items()}
        image = ImageMediaIO(**kwargs.get("image", {}))
        settings = kwargs.get("video", {})
        num_frames = settings.get("num_frames", 1)
        if not isinstance(num_frames, int) or num_frames < 1:
            raise ValueError(f"media_io_kwargs: video.num_frames is {num_frames}; a video needs a bound")
        backend = get_video_loader_backend_for_processor(get_video_processor_cls_name(model_config))
        if backend and "video_backend" not in settings:
            settings["video_backend"] = backend
        try:
            self._image = image
            self._video = VideoMediaIO(image, **settings)
            self._audio = AudioMediaIO(**kwargs.get("audio", {}))
        except (TypeError, AssertionError) as error:
            raise ValueError(f"media_io_kwargs: {error}") from None
        self._video.video_loader = _bounded(type(self._video.video_loader), self._limits)()
        self._load: dict[str, Callable[[bytes], Any]] = {
            "image": self._load_image,
            "video": self._load_video,
            "audio": self._load_audio,
        }

    def decode(self, item: MediaItem) -> Any:
        """The item as its modality's processor takes it.

        Raises:
            MediaTooLargeError: it is over a limit.
            ValueError: it cannot be decoded; the message says why, to its sender.
        """
        if item.decoded is None:
            try:
                return self._load[item.modality](item.data)
            except (MediaTooLargeError, MemoryError):
                raise
            except Exception as error:  # decoders raise what they like at hostile bytes
                raise _plain(error) from error
        shape, rate_hz = item.decoded.shape, item.decoded.rate_hz
        data: Any = item.data
        if not isinstance(data, bytearray):
            data = bytearray(data)  # arrays that can be written to, as decoders return them
        if item.modality == "audio":
            samples = np.frombuffer(data, "<f4").reshape(shape)
            self._limits.check_samples(samples, rate_hz)
            return samples, rate_hz
        pixels = np.frombuffer(data, np.uint8).reshape(shape)
        return Image.fromarray(pixels) if item.modality == "image" else (pixels, _video_metadata(shape[0], rate_hz))

    def _load_image(self, data: bytes) -> Any:
        with self._limits.pillow():
            self._limits.check_image(data)
            return self._image.load_bytes(data)

    def _load_video(self, data: bytes) -> Any:
        refuse_traps(data)
        with no_protocols():
            self._limits.check_video(data)
            video = self._video.load_bytes(data)
        if not len(video.media[0]):
            raise ValueError("none of its frames can be decoded")
        return video

    def _load_audio(self, data: bytes) -> Any:
        refuse_traps(data)
        samples, rate_hz = self._audio.load_bytes(data)
        self._limits.check_samples(samples, rate_hz)
        return samples, rate_hz


def _bounded(loader: Any, limits: MediaLimits) -> Any:
    """A loader of vLLM's that refuses what is over `limits` before it makes room for frames."""

    class Bounded(loader):  # type: ignore[misc]
        @classmethod
        def compute_frames_index_to_sample(cls, source: Any, target: Any, **kwargs: Any) -> Any:
            limits.check_frames(source.total_frames_num)
            try:
                return super().compute_frames_index_to_sample(source, target, **kwargs)
            except (ArithmeticError, RuntimeError):  # what vLLM's arithmetic makes of such numbers
                raise ValueError(
                    f"no frames can be taken of {max(0, source.total_frames_num)} at {source.original_fps:g} a second"
                ) from None

        @classmethod
        def read_frames(cls, cap: Any, frame_idx: Any, *args: Any, **kwargs: Any) -> Any:
            limits.check_video_pixels(len(set(frame_idx)), *(int(cap.get(which)) for which in _SIZE))
            return super().read_frames(cap, frame_idx, *args, **kwargs)

    return Bounded


def _plain(error: Exception) -> ValueError:
    """The error with a sentence for the file's sender."""
    text = str(error)
    has_sentence = isinstance(error, ValueError | OSError | SyntaxError) or hasattr(error, "error_string")  # libsndfile
    if not has_sentence:
        return ValueError(f"its decoder fails with {type(error).__name__}")
    if "exceed" in text:  # how vLLM names its own limits
        return MediaTooLargeError(_NOISE.sub("", text))
    known = (plain for sign, plain in _PLAIN.items() if sign in text)
    return ValueError(next(known, "") or _NOISE.sub("", text) or type(error).__name__)


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
