"""A tiny EXAONE 4.5, whose encoder is a sibling of Qwen2.5-VL's. A picture becomes at most 64 rows."""

from pathlib import Path

from transformers import Exaone4_5_Config, Exaone4_5_ForConditionalGeneration

from tests.kit.families.checkpoint import text_config, write_checkpoint
from tests.kit.families.qwen2_vl import PATCH_SIZE, qwen2_settings
from tests.kit.families.qwen_vl import IMAGE, VIDEO, qwen_tokenizer, vision_config


def make(out: Path) -> None:
    """Write a complete checkpoint into `out`."""
    tokenizer = qwen_tokenizer("<vision>", "</vision>")
    config = Exaone4_5_Config(
        text_config=text_config(
            tokenizer, layer_types=["sliding_attention", "full_attention"], sliding_window=64, rope_theta=1e6
        ),
        vision_config=vision_config(
            PATCH_SIZE, num_key_value_heads=2, fullatt_block_indexes=[1], window_size=112, hidden_act="silu"
        ),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        tie_word_embeddings=False,
    )
    model = Exaone4_5_ForConditionalGeneration(config)
    write_checkpoint(out, tokenizer, model, "Exaone4_5_Processor", **qwen2_settings())
