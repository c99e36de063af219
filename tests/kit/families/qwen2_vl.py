"""A tiny Qwen2-VL, and what later families took from it. A picture becomes at most 64 rows."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from tests.kit.families.checkpoint import HIDDEN_SIZE, text_config, write_checkpoint
from tests.kit.families.qwen_vl import MAX_ROWS, MIN_ROWS, patches, pixels, qwen_tokenizer, token_ids, vision_config

PATCH_SIZE = 14


def make(out: Path) -> None:
    """Write a complete checkpoint into `out`."""
    tokenizer = qwen_tokenizer()
    config = Qwen2VLConfig(
        text_config=qwen2_text_config(tokenizer),
        vision_config=vision_config(PATCH_SIZE, embed_dim=64, hidden_size=HIDDEN_SIZE, mlp_ratio=2),
        tie_word_embeddings=False,
        **token_ids(tokenizer),
    )
    model = Qwen2VLForConditionalGeneration(config)
    write_checkpoint(out, tokenizer, model, "Qwen2VLProcessor", **qwen2_settings())


def qwen2_text_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """A Qwen2 with multimodal rope."""
    return text_config(
        tokenizer,
        rope_theta=1e6,
        rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]},
        use_sliding_window=False,
    )


def qwen2_settings() -> dict[str, dict[str, Any]]:
    """Of the processors of pictures and of videos."""
    common = patches(PATCH_SIZE) | {
        "min_pixels": pixels(PATCH_SIZE, MIN_ROWS),
        "max_pixels": pixels(PATCH_SIZE, MAX_ROWS),
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    return {
        "preprocessor": common | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor": common | {"video_processor_type": "Qwen2VLVideoProcessor"},
    }
