"""A tiny MiniCPM-V 4.6, whose language model is Qwen3.5's.

A picture becomes an overview and up to nine slices of it, of about four rows each.
"""

from pathlib import Path

from transformers import MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration

from tests.kit.families.checkpoint import write_checkpoint
from tests.kit.families.qwen3_5 import qwen3_5_text_config
from tests.kit.families.template import chatml
from tests.kit.families.tokenizer import byte_tokenizer

PATCH_SIZE = 14
SLICE_SIZE = 112
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"


def make(out: Path) -> None:
    """Write a complete checkpoint into `out`."""
    tokenizer = byte_tokenizer(
        chatml(image=IMAGE, video=VIDEO),
        image_token=IMAGE,
        video_token=VIDEO,
        image_start_token="<image>",
        image_end_token="</image>",
        slice_start_token="<slice>",
        slice_end_token="</slice>",
        image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
    )
    config = MiniCPMV4_6Config(
        text_config=qwen3_5_text_config(tokenizer) | {"model_type": "qwen3_5_text"},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "image_size": 224,
            "patch_size": PATCH_SIZE,
        },
        insert_layer_id=1,  # merges patches after the second of the three layers
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
    )
    slices = {"scale_resolution": SLICE_SIZE, "patch_size": PATCH_SIZE}
    write_checkpoint(
        out,
        tokenizer,
        MiniCPMV4_6ForConditionalGeneration(config),
        "MiniCPMV4_6Processor",
        preprocessor=slices | {"image_processor_type": "MiniCPMV4_6ImageProcessor"},
        video_preprocessor=slices | {"video_processor_type": "MiniCPMV4_6VideoProcessor"},
    )
