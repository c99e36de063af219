"""Seeded weights at a scale at which a picture visibly moves the answer.

A model's usual initialisation (standard deviation 0.02) makes a tiny, untrained
model answer the same whatever it sees: its embeddings drown in rounding. Weights
that keep a signal's size through each layer make the answer depend on every
input, so a test that compares answers can tell pictures apart.
"""

import torch
from transformers import PreTrainedModel

GAIN = 1.5
BIAS_SCALE = 0.1
EMBEDDING_SCALE = 0.5


def seed_weights(model: PreTrainedModel, seed: int) -> None:
    """Overwrite every parameter but the norms' gains, in the order of their names, from one seeded generator."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.data = _values(name, parameter, generator)
    token_embedding = model.get_input_embeddings()
    weight = token_embedding.get_parameter("weight")
    scale = EMBEDDING_SCALE / getattr(token_embedding, "scalar_embed_scale", 1.0)  # what Gemma's multiplies by
    weight.data = torch.randn(weight.shape, generator=generator) * scale


def _values(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if parameter.ndim >= 2:
        fan_in = parameter[0].numel()
        return torch.randn(parameter.shape, generator=generator) * (GAIN / fan_in**0.5)
    if "norm" in name and name.endswith("weight"):
        return parameter.data  # as made: one, or zero in families that add the one themselves
    return torch.randn(parameter.shape, generator=generator) * BIAS_SCALE
