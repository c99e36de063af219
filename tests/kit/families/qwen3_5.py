"""A tiny Qwen3.5: one language layer of linear attention, one of full. A picture becomes at most 64 rows."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.kit.families.checkpoint import text_config, write_checkpoint
from tests.kit.families.qwen3_vl import NUM_POSITIONS, PATCH_SIZE, qwen3_settings
from tests.kit.families.qwen_vl import qwen_tokenizer, token_ids, vision_config


def make(out: Path) -> None:
    """Write a complete checkpoint into `out`."""
    tokenizer = qwen_tokenizer()
    config = Qwen3_5Config(
        text_config=qwen3_5_text_config(tokenizer),
        vision_config=vision_config(PATCH_SIZE, num_position_embeddings=NUM_POSITIONS),
        tie_word_embeddings=False,
        **token_ids(tokenizer),
    )
    model = Qwen3_5ForConditionalGeneration(config)
    write_checkpoint(out, tokenizer, model, "Qwen3VLProcessor", **qwen3_settings())


def qwen3_5_text_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """A language model with both kinds of layers."""
    return text_config(
        tokenizer,
        layer_types=["linear_attention", "full_attention"],
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,  # vLLM's kernel for CPUs takes no other
        linear_value_head_dim=128,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    )
