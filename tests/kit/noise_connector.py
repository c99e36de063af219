"""The shim's connector, spoilt on purpose: vLLM gets seeded noise in place of each embedding.

An answer that stays the same shows that the embedding did not matter, and so that a
comparison of answers proves nothing. Used as the `connector` of `consumer_args`; vLLM
must find this module, so its PYTHONPATH holds the repository's root.
"""

import os
from typing import Any

import torch

from consumer_shim.connector import ECProducerConnector
from tests.kit.servers import NOISE_SWITCH

SEED = 7


class NoiseConnector(ECProducerConnector):
    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Load what the shim loads, then replace what is new."""
        known = set(encoder_cache)
        super().start_load_caches(encoder_cache, **kwargs)
        switch = os.environ.get(NOISE_SWITCH)
        for key in encoder_cache.keys() - known if not switch or os.path.exists(switch) else ():
            encoder_cache[key] = noise_like(encoder_cache[key])


def noise_like(embedding: torch.Tensor) -> torch.Tensor:
    """Noise of the same shape, dtype, device, mean and spread, so that only the content differs."""
    real = embedding.float()
    noise = torch.randn(real.shape, generator=torch.Generator().manual_seed(SEED)).to(real.device)
    return (noise * real.std() + real.mean()).to(embedding.dtype)
