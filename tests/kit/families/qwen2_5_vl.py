"""A tiny Qwen2.5-VL: two language layers, two vision blocks (one windowed, one full).

Every mechanism of the real model is present (windowed attention, patch merging,
multimodal rope); only the sizes are small. A picture becomes at most 64 rows.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging

from tests.kit.families.tokenizer import byte_tokenizer
from tests.kit.families.weights import seed_weights

SEED = 1234
HIDDEN_SIZE = 128
MAX_LENGTH = 4096
VOCAB_SIZE = 272  # 256 bytes and 8 special tokens, rounded up to a multiple of 16
PATCH_SIZE = 14
MERGE_SIZE = 2

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, VISION_PAD = "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END, VISION_START, VISION_END, VISION_PAD, IMAGE, VIDEO)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video_url' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def make(out: Path) -> None:
    """Write config, weights, tokenizer with its chat template, and processor configs into `out`."""
    logging.disable_progress_bar()
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(out)
    model = _model(tokenizer)
    model.save_pretrained(out)
    for name, content in _processor_files().items():
        (out / name).write_text(json.dumps(content, indent=1, sort_keys=True))


def _tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(SPECIAL_TOKENS, eos=TURN_END, pad=PAD, chat_template=CHAT_TEMPLATE, max_length=MAX_LENGTH)


def _model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in SPECIAL_TOKENS}
    model = Qwen2_5_VLForConditionalGeneration(_config(ids))
    seed_weights(model, model.get_input_embeddings(), SEED)
    model.generation_config.eos_token_id = ids[TURN_END]
    model.generation_config.do_sample = False
    return model.to(torch.bfloat16)


def _config(ids: dict[str, int]) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config=_text_config(ids),
        vision_config=_vision_config(),
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        vision_token_id=ids[VISION_PAD],
        tie_word_embeddings=False,
    )


def _text_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LENGTH,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "bos_token_id": ids[PAD],
        "eos_token_id": ids[TURN_END],
        "use_sliding_window": False,
    }


def _vision_config() -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "fullatt_block_indexes": [1],
        "window_size": 112,
        "tokens_per_second": 2,
        "hidden_act": "silu",
    }


def _processor_files() -> dict[str, dict[str, Any]]:
    processor = {"processor_class": "Qwen2_5_VLProcessor"}
    pixels = processor | {
        "min_pixels": 4 * (PATCH_SIZE * MERGE_SIZE) ** 2,
        "max_pixels": 64 * (PATCH_SIZE * MERGE_SIZE) ** 2,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": MERGE_SIZE,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    return {
        "preprocessor_config.json": pixels | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": pixels | {"video_processor_type": "Qwen2VLVideoProcessor"},
        "processor_config.json": processor,
    }
