"""What runs in a preprocessing process: one media file → the model's inputs, with vLLM's own decoder and processor."""

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.v1.serial_utils import MsgpackEncoder

from producer.core import ContentPart, DecodedForm, MediaItem
from producer.cutter import Cutter, Grid, find_cutter
from producer.decode import Decoder
from producer.media_limits import MediaLimits, MediaTooLargeError
from producer.stand_in import ProcessedItem, Processor, StandIns
from producer.wire.contract import Reason
from producer.wire.origin import current
from producer.worker_main import Message, MessageError, Work

_OUT_OF_MEMORY = re.compile("allocate memory|insufficient memory|out of memory|bad_alloc|enough memory", re.IGNORECASE)
"""What libraries say that have errors of their own for it."""
_MAX_CAUSES = 16
_INLINE_BYTES = 256
"""From this size on, a tensor is a frame of its own: the pixels of any image are."""
_MAX_GRIDS = 4096
"""Grids of which it is kept what is the same for all their images, about 1 KB each."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 64 << 20
_ADDRESS = re.compile(r"\s*<[^>]* at 0x[0-9a-fA-F]+>|\s*0x[0-9a-fA-F]{6,}|(?<!\w)/[\w./-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A media file made ready: `inputs` are the frames of vLLM's own encoding of a MultiModalKwargsItem."""

    mm_hash: str
    num_rows: int
    content_part: ContentPart
    inputs: Sequence[Any]


class MediaError(Exception):
    """The file is at fault. The message is for its sender: no path or address is in it."""

    def __init__(self, message: str, reason: Reason = Reason.MEDIA_UNREADABLE) -> None:
        super().__init__(message)
        self.reason = reason


class _Worker:
    """The process's decoders and processor. One thread uses it."""

    def __init__(
        self, model_config: ModelConfig, forms: Mapping[str, str], limits: MediaLimits, hashes: bool = True
    ) -> None:
        self._decoder = Decoder(model_config, limits)
        self._processor = Processor(model_config)
        self._stand_ins = StandIns(model_config, self._processor)
        self._forms = forms
        self._hashes = hashes
        self._encoder = MsgpackEncoder(_INLINE_BYTES)
        self._cutter = find_cutter(self._processor, hashes=hashes) if forms.get("image") == "metadata" else None
        self._lean = functools.lru_cache(_MAX_GRIDS)(self._without_pixels)

    def prepare(self, item: MediaItem) -> Prepared:
        """
        Raises:
            MediaError: the file is at fault.
        """
        try:
            return self._prepare(item)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            message = f"the {item.modality} takes more memory to decode and preprocess than is allowed"
            raise MediaError(message, Reason.MEDIA_TOO_LARGE) from None

    def _prepare(self, item: MediaItem) -> Prepared:
        try:
            media = self._decoder.decode(item)
        except Exception as error:  # decoders raise what they like at hostile bytes; it is the file's fault
            if _is_out_of_memory(error):
                raise
            reason = Reason.MEDIA_TOO_LARGE if isinstance(error, MediaTooLargeError) else Reason.MEDIA_UNREADABLE
            raise MediaError(_for_sender(f"the {item.modality} cannot be decoded", error), reason) from None
        if self._cutter is not None and item.modality == "image":
            return self._cut(self._cutter, media)
        with _refusals(item.modality):
            processed = self._processor.process(item.modality, media)
        return self._prepared(processed)

    def _cut(self, cutter: Cutter, image: Any) -> Prepared:
        """As `_prepare`, with compact pixels."""
        with _refusals("image"):
            patches, grid = cutter.cut(image)
        lean = self._lean(grid)
        mm_hash = self._processor.mm_hash("image", image) if self._hashes else ""
        return replace(lean, mm_hash=mm_hash, inputs=[*lean.inputs, patches.data.cast("B")])

    def _without_pixels(self, grid: Grid) -> Prepared:
        """What is the same for all images of this grid: `inputs` lack the last frame, which are the patches."""
        assert self._cutter is not None
        prepared = self._prepared(self._cutter.processed(grid))
        head, _ = prepared.inputs
        return replace(prepared, inputs=[head])

    def _prepared(self, processed: ProcessedItem) -> Prepared:
        return Prepared(
            mm_hash=processed.mm_hash,
            num_rows=processed.num_rows,
            content_part=self._stand_ins.part(self._forms[processed.modality], processed),
            inputs=self._encoder.encode(processed.kwargs),
        )

    def answer(self, request: Message) -> Message:
        try:
            prepared = self.prepare(_item(request))
        except MediaError as error:
            return Message(fields={"refused": error.reason.value, "why": str(error)})
        fields = {
            "mm_hash": prepared.mm_hash,
            "num_rows": prepared.num_rows,
            "content_part": prepared.content_part,
        }
        return Message(fields=fields, frames=prepared.inputs)


def modules(model_config: ModelConfig) -> list[str]:
    """What a process imports. Imported once, before processes are forked, it makes a start a matter of milliseconds."""
    from vllm.model_executor.model_loader import get_model_architecture

    return [__name__, get_model_architecture(model_config)[0].__module__]


def make(model_config: ModelConfig, forms: Mapping[str, str], limits: MediaLimits, hashes: bool = True) -> Work:
    """Runs once in each process, before its first file; what it returns answers what `request` makes.

    Args:
        model_config: vLLM's.
        forms: by modality, the form of the content part that stands for an item.
        limits: what a file may have.
        hashes: whether anybody wants `mm_hash`; it is "" of a compact image otherwise.
    """
    torch.set_num_threads(1)
    _keep_freed_memory()
    return _Worker(model_config, forms, limits, hashes).answer


def _keep_freed_memory() -> None:
    """Has malloc keep up to `_KEPT_BYTES` that were freed: what the kernel takes back, it clears for the next file.

    For a photograph that may take longer than to decode it. Other C libraries than glibc do as they like.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)  # which is the most that there is
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def request(item: MediaItem) -> Message:
    """What asks a process for the inputs of `item`."""
    form = item.decoded
    fields = {
        "modality": item.modality,
        "shape": None if form is None else form.shape,
        "rate_hz": None if form is None else form.rate_hz,
    }
    return Message(fields=fields, frames=[item.data], origin=current())


def prepared(answer: Message) -> Prepared:
    """What a process answered, which is not believed further than its types.

    Raises:
        MediaError: the file is at fault.
        MessageError: it is not an answer.
    """
    match answer.fields:
        case {"refused": (Reason.MEDIA_UNREADABLE | Reason.MEDIA_TOO_LARGE) as reason, "why": str(why)}:
            raise MediaError(why, Reason(reason))
        case {"mm_hash": str(mm_hash), "num_rows": int(num_rows), "content_part": dict(content_part)} if (
            type(num_rows) is int and num_rows >= 0
        ):
            return Prepared(mm_hash=mm_hash, num_rows=num_rows, content_part=content_part, inputs=answer.frames)
    raise MessageError("a preprocessing process gave an answer that is none")


def _item(message: Message) -> MediaItem:
    fields, (data,) = message.fields, message.frames
    if fields["shape"] is None:
        return MediaItem(modality=fields["modality"], data=bytes(data))
    form = DecodedForm(shape=tuple(fields["shape"]), rate_hz=fields["rate_hz"])
    return MediaItem(modality=fields["modality"], data=data, decoded=form)  # as it came, which is the decoder's to use


@contextlib.contextmanager
def _refusals(modality: str) -> Iterator[None]:
    """Makes a MediaError of the ValueError with which a processor refuses a file, as it does within."""
    try:
        yield
    except ValueError as error:
        if _is_out_of_memory(error):
            raise
        cause = error.__cause__
        why = cause if isinstance(cause, ValueError) else error  # vLLM wraps it in a dump of what it was given
        raise MediaError(_for_sender(f"the model's processor refuses this {modality}", why)) from None


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was what `error`, or what it came of, lacked."""
    for _ in range(_MAX_CAUSES):  # a chain of causes may be a ring
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error and (error.__cause__ or error.__context__)
    return False


def _for_sender(what: str, error: BaseException) -> str:
    reason = _ADDRESS.sub("", " ".join(str(error).split())) or type(error).__name__
    return f"{what}: {reason[:300]}"
