"""A tiny InternVL as transformers has it. A picture becomes up to four tiles and their overview, nine rows each."""

from pathlib import Path

from transformers import InternVLConfig, InternVLForConditionalGeneration

from tests.kit.families.checkpoint import text_config, write_checkpoint
from tests.kit.families.template import chatml
from tests.kit.families.tokenizer import byte_tokenizer

IMAGE, VIDEO = "<IMG_CONTEXT>", "<video>"
TILE_SIZE = 84
PATCH_SIZE = 14
ROWS_PER_TILE = 9  # of 36 patches


def make(out: Path) -> None:
    """Write a complete checkpoint into `out`."""
    tokenizer = byte_tokenizer(
        chatml(image=IMAGE, video=VIDEO),
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token=IMAGE,
        video_token=VIDEO,
    )
    config = InternVLConfig(
        text_config=text_config(tokenizer, model_type="qwen2"),
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "image_size": [TILE_SIZE, TILE_SIZE],
            "patch_size": [PATCH_SIZE, PATCH_SIZE],
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=ROWS_PER_TILE,
        tie_word_embeddings=False,
    )
    size = {"height": TILE_SIZE, "width": TILE_SIZE}
    write_checkpoint(
        out,
        tokenizer,
        InternVLForConditionalGeneration(config),
        "InternVLProcessor",
        processor={"image_seq_length": ROWS_PER_TILE},
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": size,
            "crop_to_patches": True,
            "max_patches": 4,
        },
        video_preprocessor={"video_processor_type": "InternVLVideoProcessor", "size": size},
    )
