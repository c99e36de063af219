"""Seeded weights at a scale at which a picture visibly moves the answer.

A model's usual initialisation (standard deviation 0.02) makes a tiny, untrained
model answer the same whatever it sees: its embeddings drown in rounding. Weights
that keep a signal's size through each layer make the answer depend on every
input, so a test that compares answers can tell pictures apart.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

GAIN = 1.5
BIAS_SCALE = 0.1
EMBEDDING_SCALE = 0.5
NORMS = ("norm", "ln_q")  # parts of their names
ATTENTION_NORMS = ("q_norm.weight", "k_norm.weight")
SLOW_DECAY = -3.0


def seed_weights(model: PreTrainedModel, seed: int, norms: Sequence[str] = NORMS) -> None:
    """Overwrite every parameter, in the order of their names, from one seeded generator.

    The norms keep their gains: one, or zero in families that add the one themselves.
    Those of queries and keys get `GAIN`, so that attention is as sharp as without them.
    Linear attention decays so slowly that its state outlasts a picture.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if name.endswith(ATTENTION_NORMS):
            parameter.data += GAIN - 1
        elif parameter.ndim >= 2 or not name.endswith("weight") or not any(norm in name for norm in norms):
            parameter.data = _values(name, parameter, generator)
    embedding = model.get_input_embeddings()
    weight = embedding.get_parameter("weight")
    scale = EMBEDDING_SCALE / getattr(embedding, "scalar_embed_scale", 1.0)  # by which Gemma multiplies
    weight.data = torch.randn(weight.shape, generator=generator) * scale


def _values(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    scale = GAIN / parameter[0].numel() ** 0.5 if parameter.ndim >= 2 else BIAS_SCALE
    mean = SLOW_DECAY if name.endswith("A_log") else 0.0
    return torch.randn(parameter.shape, generator=generator) * scale + mean
