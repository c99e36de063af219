"""A tiny Qwen3-VL with DeepStack: two of its three vision blocks also feed the language layers.

A picture becomes at most 64 rows, each three times as wide as the language model.
"""

from pathlib import Path
from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.kit.families.checkpoint import text_config, write_checkpoint
from tests.kit.families.qwen_vl import MAX_ROWS, MIN_ROWS, patches, pixels, qwen_tokenizer, token_ids, vision_config

PATCH_SIZE = 16
NUM_POSITIONS = 256  # a square grid that is resampled to each picture's


def make(out: Path) -> None:
    """Write a complete checkpoint into `out`."""
    tokenizer = qwen_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config=text_config(tokenizer, head_dim=32, rope_parameters=rope),
        vision_config=vision_config(
            PATCH_SIZE, depth=3, deepstack_visual_indexes=[0, 1], num_position_embeddings=NUM_POSITIONS
        ),
        tie_word_embeddings=False,
        **token_ids(tokenizer),
    )
    model = Qwen3VLForConditionalGeneration(config)
    write_checkpoint(out, tokenizer, model, "Qwen3VLProcessor", **qwen3_settings())


def qwen3_settings() -> dict[str, dict[str, Any]]:
    """Of the processors of pictures and of videos. A video becomes at most as many rows as a picture."""
    common = patches(PATCH_SIZE) | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    smallest = pixels(PATCH_SIZE, MIN_ROWS)
    image_size = {"shortest_edge": smallest, "longest_edge": pixels(PATCH_SIZE, MAX_ROWS)}
    video_size = {"shortest_edge": smallest, "longest_edge": 2 * pixels(PATCH_SIZE, MAX_ROWS)}  # two frames a row
    return {
        "preprocessor": common | {"image_processor_type": "Qwen2VLImageProcessor", "size": image_size},
        "video_preprocessor": common
        | {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": video_size,
            "fps": 2,
            "min_frames": 2,
            "max_frames": 16,
            "cap_pixels_per_frame": True,
        },
    }
