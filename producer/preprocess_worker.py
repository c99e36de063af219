"""What runs in a preprocessing process: one media file → the model's inputs, with vLLM's own decoder and processor."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.media import ImageMediaIO
from vllm.v1.serial_utils import MsgpackEncoder

from producer.core import Metadata, NumberArray

_DECODERS: dict[str, Callable[..., Any]] = {"image": ImageMediaIO}
"""vLLM's decoder of a media file, by modality."""

MODALITIES = tuple(_DECODERS)
_ADDRESS = re.compile(r"\s*<[^>]* at 0x[0-9a-f]+>|\s*0x[0-9a-f]{6,}|(?<!\w)/[\w./-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A media file made ready: `inputs` are the frames of vLLM's own encoding of a MultiModalKwargsItem."""

    mm_hash: str
    num_rows: int
    metadata: Metadata
    inputs: list[bytearray]


class MediaError(Exception):
    """The file is at fault. The message is for its sender: no path or address is in it."""


class _Worker:
    """The process's processor. One thread uses it."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._processor = MULTIMODAL_REGISTRY.create_processor(model_config)
        self._media_io_kwargs = model_config.multimodal_config.media_io_kwargs
        self._encoder = MsgpackEncoder()

    def prepare(self, modality: str, data: bytes) -> Prepared:
        media = self._decode(modality, data)
        processor = self._processor
        try:
            items = processor.info.parse_mm_data({modality: [media]})
            output = processor(processor.dummy_inputs.get_dummy_text({modality: 1}), items)
        except ValueError as error:
            raise MediaError(_for_sender(f"the model's processor refuses this {modality}", error)) from None
        item = output["mm_kwargs"][modality][0]
        fields = processor.info.data_parser.placeholder_metadata_fields(modality)
        return Prepared(
            mm_hash=output["mm_hashes"][modality][0],
            num_rows=output["mm_placeholders"][modality][0].get_num_embeds(),
            metadata={name: _numbers(item[name].data) for name in sorted(fields)},
            inputs=[bytearray(frame) for frame in self._encoder.encode(item)],
        )

    def _decode(self, modality: str, data: bytes) -> Any:
        decoder = _DECODERS[modality](**self._media_io_kwargs.get(modality, {}))
        try:
            return decoder.load_bytes(data)
        except Exception as error:  # decoders raise what they like at hostile bytes; it is the file's fault
            raise MediaError(_for_sender(f"the {modality} cannot be decoded", error)) from None


_worker: _Worker


def start(model_config: ModelConfig) -> None:
    """Runs once in each process, before its first file."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the producer's to handle: it drains first
    threading.Thread(target=_end_with_producer, daemon=True).start()
    torch.set_num_threads(1)
    _worker = _Worker(model_config)


def prepare(modality: str, data: bytes) -> Prepared:
    """Decodes and preprocesses one file.

    Raises:
        MediaError: the file is at fault.
    """
    return _worker.prepare(modality, data)


def is_ready() -> bool:
    """True; the first call of a process comes after its `start`."""
    return True


def _end_with_producer() -> None:
    """A killed producer tells its processes nothing, and the fork server lives as long as any of them does."""
    producer = multiprocessing.parent_process()
    assert producer is not None
    producer.join()
    os._exit(1)


def _numbers(value: Any) -> NumberArray:
    tensor = torch.as_tensor(value)
    return NumberArray(shape=tuple(tensor.shape), values=tuple(tensor.flatten().tolist()))


def _for_sender(what: str, error: BaseException) -> str:
    reason = _ADDRESS.sub("", " ".join(str(error).split())) or type(error).__name__
    return f"{what}: {reason[:300]}"
