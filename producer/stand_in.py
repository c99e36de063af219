"""What stands for a media item in a chat request to an LLM-only vLLM: a content part of which it makes the same prompt.

There are three forms: the metadata that the model's data parser declares (`image_grid_thw`), an embedding of the right
size without content, and a blank image of the same size. `choose_forms` tries them with a sample of each modality on a
view of the model as an LLM-only server has it; so what vLLM accepts decides, and a form that is offered has worked.
"""

import base64
import contextlib
import copy
import functools
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.renderers.chat_utils import parse_chat_messages

from producer.core import ContentPart
from producer.decode import Decoder, sample
from producer.wire.families import EXTRA_FIELDS


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedItem:
    """One media item as vLLM's processor left it."""

    modality: str
    media: Any
    kwargs: MultiModalKwargsItem
    prompt: Sequence[int]  # token ids of a prompt with this item alone
    placeholder: PlaceholderRange
    mm_hash: str

    @property
    def num_rows(self) -> int:
        return int(self.placeholder.get_num_embeds())


class Processor:
    """vLLM's processor of one model: media → inputs of the encoder, and the place in the prompt. Not thread-safe."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._processor = MULTIMODAL_REGISTRY.create_processor(model_config)
        self._text = functools.cache(lambda modality: self._processor.dummy_inputs.get_dummy_text({modality: 1}))
        self.info = self._processor.info

    def process(self, modality: str, media: Any) -> ProcessedItem:
        """
        Raises:
            ValueError: the model does not take this item.
        """
        return self.process_data(modality, {modality: [media]}, media)

    def process_data(self, modality: str, data: Any, media: Any = None) -> ProcessedItem:
        """As `process`, for the one item in vLLM's `multi_modal_data`."""
        items = self.info.parse_mm_data(data)
        output = self._processor(self._text(modality), items)
        return ProcessedItem(
            modality=modality,
            media=media,
            kwargs=output["mm_kwargs"][modality][0],
            prompt=output["prompt_token_ids"],
            placeholder=output["mm_placeholders"][modality][0],
            mm_hash=output["mm_hashes"][modality][0],
        )

    def item(self, modality: str, fields: Mapping[str, torch.Tensor]) -> MultiModalKwargsItem:
        """The item that vLLM makes of what the model's own processor returned for it."""
        config = self._processor._get_mm_fields_config(fields, {})
        item: MultiModalKwargsItem = MultiModalKwargsItems.from_hf_inputs(fields, config)[modality][0]
        return item

    def mm_hash(self, modality: str, media: Any) -> str:
        """vLLM's hash of an item, as `process` has it."""
        from vllm.multimodal.processing import ProcessorInputs

        items = self.info.parse_mm_data({modality: [media]})
        hashes: list[str] = self._processor._get_mm_hashes(ProcessorInputs([], items))[modality]
        return hashes[0]


class StandIns:
    """Makes the content parts for one model."""

    def __init__(self, model_config: ModelConfig, processor: Processor) -> None:
        self._fields = processor.info.data_parser.placeholder_metadata_fields
        self._tensor = torch.zeros(1, dtype=model_config.dtype)
        self._width = model_config.get_inputs_embeds_size()
        self._uses_mrope = model_config.uses_mrope
        self._forms: dict[str, Callable[[ProcessedItem], ContentPart]] = {
            "metadata": self._metadata,
            "tensor": self._embedding,
            "image": _blank_image,
        }

    def part(self, form: str, item: ProcessedItem) -> ContentPart:
        """The content part for `item`, but for its uuid.

        Raises:
            ValueError, KeyError: the form does not fit the model.
        """
        return self._forms[form](item)

    def _metadata(self, item: ProcessedItem) -> ContentPart:
        declared = self._fields(item.modality)
        if not declared:
            raise ValueError("vLLM declares no metadata that sizes its placeholder")
        fields = {name: _plain(_field(name, item)) for name in sorted(declared)}
        extra = EXTRA_FIELDS.get(item.modality, frozenset()) & item.kwargs.keys()
        fields |= {name: _saved(item.kwargs[name].data) for name in sorted(extra)}
        return _embeds(item.modality, fields)

    def _embedding(self, item: ProcessedItem) -> ContentPart:
        """Zeros that share one element, so that it takes little room."""
        if self._uses_mrope:
            raise ValueError("the model's rotary positions follow from an item's grid, which an embedding has not")
        return _embeds(item.modality, _saved(self._tensor.expand(item.num_rows, self._width)))


def choose_forms(model_config: ModelConfig, modalities: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The form that stands for an item, and why there is none, each by modality.

    Raises:
        ValueError: the settings for media do not fit the model.
    """
    decoder, processor = Decoder(model_config), Processor(model_config)
    stand_ins, llm_only = StandIns(model_config, processor), _LlmOnly(model_config)
    forms: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for modality in modalities:
        if processor.info.supported_mm_limits.get(modality, 0) == 0:
            reasons[modality] = "the model takes none"
            continue
        try:
            item = processor.process(modality, decoder.decode(sample(modality)))
        except Exception as error:  # decoders and models raise what they like
            reasons[modality] = f"a sample cannot be processed: {error}"
            continue
        for form in ("metadata", "tensor", *(("image",) if modality == "image" else ())):
            try:
                with _quiet():
                    stood_for = llm_only.process(modality, stand_ins.part(form, item))
            except Exception as error:  # models raise what they like at what they do not take
                reasons.setdefault(modality, f"by {form}: {error}")
                continue
            if (stood_for.prompt, stood_for.placeholder) == (item.prompt, item.placeholder):
                forms[modality] = form
                reasons.pop(modality, None)
                break
            reasons.setdefault(modality, f"by {form}: vLLM makes another prompt of it")
    return forms, reasons


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """vLLM logs a traceback for some of what it does not take, which is no error here."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


class _LlmOnly:
    """The model as a vLLM sees it whose embeddings come from elsewhere."""

    def __init__(self, model_config: ModelConfig) -> None:
        self._model_config = copy.copy(model_config)
        self._model_config.multimodal_config = copy.copy(model_config.multimodal_config)
        self._model_config.multimodal_config.enable_mm_embeds = True
        self._model_config.multimodal_config.allow_missing_mm_embeddings = True
        self._processor = Processor(self._model_config)

    def process(self, modality: str, part: ContentPart) -> ProcessedItem:
        messages = [{"role": "user", "content": [{**part, "uuid": "sample"}]}]
        _, data, _ = parse_chat_messages(messages, self._model_config, content_format="openai")
        return self._processor.process_data(modality, data)


def _field(name: str, item: ProcessedItem) -> Any:
    """A declared field: nearly always what the processor computed, under that name."""
    if name == "audio_num_tokens":
        return [item.num_rows]
    if name == "image_sizes" and name not in item.kwargs:
        return item.media.size
    return item.kwargs[name].data


def _embeds(modality: str, value: Any) -> ContentPart:
    return {"type": f"{modality}_embeds", f"{modality}_embeds": value}


def _blank_image(item: ProcessedItem) -> ContentPart:
    file = io.BytesIO()
    Image.new("RGB", item.media.size).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _plain(value: Any) -> Any:
    """Numbers as JSON has them, exactly, where vLLM takes them so: in one dimension."""
    if not isinstance(value, torch.Tensor):
        return list(value)
    return value.flatten().tolist() if value.ndim < 2 else _saved(value)


def _saved(value: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()
