"""What the families have in common: the language model's sizes, and the files of a checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from tests.kit.families.tokenizer import MAX_LENGTH, PAD, TURN_END
from tests.kit.families.weights import NORMS, seed_weights

SEED = 1234
HIDDEN_SIZE = 128
VOCAB_MULTIPLE = 16


def text_config(tokenizer: PreTrainedTokenizerFast, **family: Any) -> dict[str, Any]:
    """The fields of a language model of two layers, with a family's own added."""
    return {
        "vocab_size": -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.convert_tokens_to_ids(PAD),
        "eos_token_id": tokenizer.convert_tokens_to_ids(TURN_END),
    } | family


def write_checkpoint(
    out: Path,
    tokenizer: PreTrainedTokenizerFast,
    model: PreTrainedModel,
    processor_class: str,
    *,
    norms: Sequence[str] = NORMS,
    **settings: dict[str, Any],
) -> None:
    """Seed `model`, whose norms are told by their names, and write everything that vLLM loads into `out`.

    `settings` are named after the processors' files: `preprocessor` is the content of `preprocessor_config.json`.
    """
    logging.disable_progress_bar()
    seed_weights(model, SEED, norms)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.do_sample = False
    tokenizer.save_pretrained(out)
    model.to(torch.bfloat16).save_pretrained(out)
    for name, values in ({"processor": {}} | settings).items():
        content = values | {"processor_class": processor_class}
        (out / f"{name}_config.json").write_text(json.dumps(content, indent=1, sort_keys=True))


def rename_weights(out: Path, prefix: str, published: str) -> None:
    """Name weights as in a family's published checkpoints where transformers writes another prefix."""
    path = out / "model.safetensors"
    weights = {
        published + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
