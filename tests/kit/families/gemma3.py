"""A tiny Gemma 3: one windowed language layer and one full one. A picture becomes 36 rows."""

from pathlib import Path

from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from tests.kit.families.checkpoint import rename_weights, text_config, write_checkpoint
from tests.kit.families.template import chatml
from tests.kit.families.tokenizer import byte_tokenizer

IMAGE_SIZE = 168
PATCH_SIZE = 14
NUM_ROWS = 36  # of 144 patches
START, END, IMAGE = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")  # vLLM looks for them around a picture


def make(out: Path) -> None:
    """Write a complete checkpoint into `out`."""
    tokenizer = byte_tokenizer(chatml(image=START), *NEWLINES, boi_token=START, eoi_token=END, image_token=IMAGE)
    config = Gemma3Config(
        text_config=text_config(
            tokenizer,
            head_dim=32,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=64,
        ),
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        mm_tokens_per_image=NUM_ROWS,
        boi_token_index=tokenizer.convert_tokens_to_ids(START),
        eoi_token_index=tokenizer.convert_tokens_to_ids(END),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        tie_word_embeddings=False,  # unlike the real one: tied, so small a model repeats one token
    )
    write_checkpoint(
        out,
        tokenizer,
        Gemma3ForConditionalGeneration(config),
        "Gemma3Processor",
        processor={"image_seq_length": NUM_ROWS},
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        },
    )
    rename_weights(out, "vision_tower.", "vision_tower.vision_model.")
