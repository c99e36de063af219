"""What vLLM does not declare of its model families, and both sides must know. All of it is here."""

from collections.abc import Mapping
from typing import Any, Final

EXTRA_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "image": frozenset({"tgt_sizes"}),  # MiniCPM-V: vLLM's field config of an image leans on it
    "video": frozenset({"second_per_grid_ts"}),  # Qwen2.5-VL: rotary positions; without it every video counts as 2 fps
}
"""Processed fields, by modality, that go with the declared metadata of an item and are no embedding."""


def embedding_width(model_config: Any, modality: str) -> int:
    """Elements a row of an embedding of `modality`, for vLLM's `model_config`.

    As many as the language model's first layer takes, and with DeepStack, of which sound has no part, further layers.
    """
    levels = 0 if modality == "audio" else num_deepstack_levels(model_config.hf_config)
    width: int = model_config.get_inputs_embeds_size()
    return width * (1 + levels)


def num_deepstack_levels(config: Any) -> int:
    """Layers of the language model that take image features of their own (Qwen3-VL's DeepStack)."""
    vision = getattr(getattr(config, "thinker_config", config), "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())
