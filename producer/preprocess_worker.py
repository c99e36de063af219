"""What runs in a preprocessing process: one media file → the model's inputs, with vLLM's own decoder and processor."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.config import ModelConfig
from vllm.v1.serial_utils import MsgpackEncoder

from producer.core import ContentPart, MediaItem
from producer.decode import Decoder
from producer.stand_in import Processor, StandIns

_ADDRESS = re.compile(r"\s*<[^>]* at 0x[0-9a-fA-F]+>|\s*0x[0-9a-fA-F]{6,}|(?<!\w)/[\w./-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A media file made ready: `inputs` are the frames of vLLM's own encoding of a MultiModalKwargsItem."""

    mm_hash: str
    num_rows: int
    content_part: ContentPart
    inputs: list[bytearray]


class MediaError(Exception):
    """The file is at fault. The message is for its sender: no path or address is in it."""


class _Worker:
    """The process's decoders and processor. One thread uses it."""

    def __init__(self, model_config: ModelConfig, forms: Mapping[str, str]) -> None:
        self._decoder = Decoder(model_config)
        self._processor = Processor(model_config)
        self._stand_ins = StandIns(model_config, self._processor)
        self._forms = forms
        self._encoder = MsgpackEncoder()

    def prepare(self, item: MediaItem) -> Prepared:
        try:
            media = self._decoder.decode(item)
        except Exception as error:  # decoders raise what they like at hostile bytes; it is the file's fault
            raise MediaError(_for_sender(f"the {item.modality} cannot be decoded", error)) from None
        try:
            processed = self._processor.process(item.modality, media)
        except ValueError as error:
            raise MediaError(_for_sender(f"the model's processor refuses this {item.modality}", error)) from None
        return Prepared(
            mm_hash=processed.mm_hash,
            num_rows=processed.num_rows,
            content_part=self._stand_ins.part(self._forms[item.modality], processed),
            inputs=[bytearray(frame) for frame in self._encoder.encode(processed.kwargs)],
        )


_worker: _Worker


def start(model_config: ModelConfig, forms: Mapping[str, str]) -> None:
    """Runs once in each process, before its first file."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the producer's to handle: it drains first
    threading.Thread(target=_end_with_producer, daemon=True).start()
    torch.set_num_threads(1)
    _worker = _Worker(model_config, forms)


def prepare(item: MediaItem) -> Prepared:
    """Decodes and preprocesses one item.

    Raises:
        MediaError: the item is at fault.
    """
    return _worker.prepare(item)


def is_ready() -> bool:
    """True; the first call of a process comes after its `start`."""
    return True


def _end_with_producer() -> None:
    """A killed producer tells its processes nothing, and the fork server lives as long as any of them does."""
    producer = multiprocessing.parent_process()
    assert producer is not None
    producer.join()
    os._exit(1)


def _for_sender(what: str, error: BaseException) -> str:
    reason = _ADDRESS.sub("", " ".join(str(error).split())) or type(error).__name__
    return f"{what}: {reason[:300]}"
