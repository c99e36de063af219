"""Seeded weights at a scale at which a picture visibly moves the answer.

A model's usual initialisation (standard deviation 0.02) makes a tiny, untrained
model answer the same whatever it sees: its embeddings drown in rounding. Weights
that keep a signal's size through each layer make the answer depend on every
input, so a test that compares answers can tell pictures apart.
"""

import torch

GAIN = 1.5
BIAS_SCALE = 0.1
EMBEDDING_SCALE = 0.5


def seed_weights(model: torch.nn.Module, token_embedding: torch.nn.Module, seed: int) -> None:
    """Overwrite every parameter, in the order of their names, from one seeded generator."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.data = _values(name, parameter, generator)
    weight = token_embedding.get_parameter("weight")
    weight.data = torch.randn(weight.shape, generator=generator) * EMBEDDING_SCALE


def _values(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if parameter.ndim >= 2:
        fan_in = parameter[0].numel()
        return torch.randn(parameter.shape, generator=generator) * (GAIN / fan_in**0.5)
    if "norm" in name and name.endswith("weight"):
        return torch.ones(parameter.shape)
    return torch.randn(parameter.shape, generator=generator) * BIAS_SCALE
