"""What the tiny models take: the families of `tests.kit.families`, without what it takes to make them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    modalities: tuple[str, ...]
    without_encoder: tuple[str, ...]
    """Modalities whose encoder an LLM-only vLLM need not load; it must where a blank image stands for an image."""


_PICTURES = Family(modalities=("image", "video"), without_encoder=("image", "video"))
_STAND_IN_IMAGE = Family(modalities=("image",), without_encoder=())

FAMILIES = {
    "qwen2_vl": _PICTURES,
    "qwen2_5_vl": _PICTURES,
    "qwen3_vl": _PICTURES,
    "qwen3_5": _PICTURES,
    "exaone4_5": _PICTURES,
    "minicpm_v4_6": _PICTURES,
    "internvl": Family(modalities=("image",), without_encoder=("image", "video")),
    "gemma3": _STAND_IN_IMAGE,
    "smolvlm": _STAND_IN_IMAGE,
    "idefics3": _STAND_IN_IMAGE,
    "qwen2_audio": Family(modalities=("audio",), without_encoder=("audio",)),
}
