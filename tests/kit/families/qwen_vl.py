"""What the Qwen-VL families share: tokens, chat template, and pictures as grids of patches."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.kit.families.checkpoint import HIDDEN_SIZE
from tests.kit.families.template import chatml
from tests.kit.families.tokenizer import byte_tokenizer

MERGE_SIZE = 2
MIN_ROWS, MAX_ROWS = 4, 64

IMAGE, VIDEO, VISION_PAD = "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"


def qwen_tokenizer(start: str = VISION_START, end: str = VISION_END) -> PreTrainedTokenizerFast:
    """A picture or a video stands between `start` and `end`."""
    template = chatml(image=f"{start}{IMAGE}{end}", video=f"{start}{VIDEO}{end}")
    return byte_tokenizer(template, start, end, VISION_PAD, IMAGE, VIDEO)


def token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The config's fields that name the tokens of vision."""
    return {
        "image_token_id": tokenizer.convert_tokens_to_ids(IMAGE),
        "video_token_id": tokenizer.convert_tokens_to_ids(VIDEO),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids(VISION_START),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids(VISION_END),
    }


def vision_config(patch_size: int, **family: Any) -> dict[str, Any]:
    """The fields of an encoder of two blocks, with a family's own added."""
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": patch_size,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
    } | family


def patches(patch_size: int) -> dict[str, Any]:
    """The settings with which a processor cuts pictures, or the frames of a video, into patches."""
    return {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": MERGE_SIZE}


def pixels(patch_size: int, rows: int) -> int:
    """How many pixels become so many rows of an embedding."""
    return rows * (patch_size * MERGE_SIZE) ** 2
