"""A tiny Idefics3 and its sibling SmolVLM. A picture becomes up to four tiles and their overview, nine rows each.

SmolVLM's processor needs the package num2words.
"""

from pathlib import Path
from typing import Any

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from tests.kit.families.checkpoint import text_config, write_checkpoint
from tests.kit.families.template import chatml
from tests.kit.families.tokenizer import PAD, byte_tokenizer

TILE_SIZE = 84
PATCH_SIZE = 14
ROWS_PER_TILE = 9  # of 36 patches
IMAGE = "<image>"
TILE_TOKENS = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]


def make(out: Path) -> None:
    """Write a complete checkpoint of Idefics3 into `out`."""
    tokenizer = _tokenizer()
    model = Idefics3ForConditionalGeneration(Idefics3Config(**_config(tokenizer)))
    write_checkpoint(out, tokenizer, model, "Idefics3Processor", **_settings("Idefics3"))


def make_smolvlm(out: Path) -> None:
    """Write a complete checkpoint of SmolVLM into `out`."""
    tokenizer = _tokenizer()
    model = SmolVLMForConditionalGeneration(SmolVLMConfig(**_config(tokenizer)))
    video = {"video_processor_type": "SmolVLMVideoProcessor"}
    write_checkpoint(out, tokenizer, model, "SmolVLMProcessor", **_settings("SmolVLM"), video_preprocessor=video)


def _tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(
        chatml(image=IMAGE),
        *TILE_TOKENS,
        image_token=IMAGE,
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )


def _config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "text_config": text_config(tokenizer, model_type="llama"),
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "image_size": TILE_SIZE,
            "patch_size": PATCH_SIZE,
        },
        "scale_factor": 2,
        "image_token_id": tokenizer.convert_tokens_to_ids(IMAGE),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }


def _settings(family: str) -> dict[str, dict[str, Any]]:
    return {
        "processor": {"image_seq_len": ROWS_PER_TILE},
        "preprocessor": {
            "image_processor_type": f"{family}ImageProcessor",
            "size": {"longest_edge": 2 * TILE_SIZE},
            "max_image_size": {"longest_edge": TILE_SIZE},
        },
    }
