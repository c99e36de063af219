"""A tiny Qwen2.5-VL: two language layers, two vision blocks (one windowed, one full).

Every mechanism of the real model is present (windowed attention, patch merging,
multimodal rope); only the sizes are small. A picture becomes at most 64 rows.
"""

from pathlib import Path

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tests.kit.families.checkpoint import write_checkpoint
from tests.kit.families.qwen2_vl import PATCH_SIZE, qwen2_settings, qwen2_text_config
from tests.kit.families.qwen_vl import VISION_PAD, qwen_tokenizer, token_ids, vision_config


def make(out: Path) -> None:
    """Write a complete checkpoint into `out`."""
    tokenizer = qwen_tokenizer()
    config = Qwen2_5_VLConfig(
        text_config=qwen2_text_config(tokenizer),
        vision_config=vision_config(
            PATCH_SIZE, fullatt_block_indexes=[1], window_size=112, tokens_per_second=2, hidden_act="silu"
        ),
        vision_token_id=tokenizer.convert_tokens_to_ids(VISION_PAD),
        tie_word_embeddings=False,
        **token_ids(tokenizer),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    write_checkpoint(out, tokenizer, model, "Qwen2_5_VLProcessor", norms=["norm"], **qwen2_settings())
