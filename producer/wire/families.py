"""What vLLM does not declare of its model families, and both sides must know. All of it is here."""

from collections.abc import Mapping
from typing import Any, Final

EXTRA_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "image": frozenset({"tgt_sizes"}),  # MiniCPM-V: vLLM's field config of an image leans on it
    "video": frozenset({"second_per_grid_ts"}),  # Qwen2.5-VL: rotary positions; without it every video counts as 2 fps
}
"""Processed fields, by modality, that go with the declared metadata of an item and are no embedding."""


def embedding_width(config: Any, input_width: int) -> int:
    """Elements a row of an embedding: with DeepStack, the features of several layers of the language model.

    Args:
        config: the model's Hugging Face configuration.
        input_width: elements of a row that enter its first layer.
    """
    return input_width * (1 + num_deepstack_levels(config))


def num_deepstack_levels(config: Any) -> int:
    """Layers of the language model that take image features of their own (Qwen3-VL's DeepStack)."""
    vision = getattr(getattr(config, "thinker_config", config), "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())
