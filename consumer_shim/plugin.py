"""vLLM plugin (`vllm.general_plugins`): keeps DeepStack on in a consumer that has no vision tower.

Qwen3-VL's language model takes image features in several of its layers. vLLM turns that off for a model whose tower it
did not load, and dies at the first embedding that comes from elsewhere. vLLM loads plugins into all its processes; this
one acts only in an EC consumer whose model was left in that state.
"""

import functools
import logging
import sys
from typing import Any

import torch

from producer.wire.families import num_deepstack_levels

logger = logging.getLogger("vllm.ec_producer")

_installed = False


def register() -> None:
    """Called by vLLM in each of its processes."""
    global _installed
    if _installed:
        return
    from vllm.model_executor.model_loader import base_loader

    initialize_model = base_loader.initialize_model

    @functools.wraps(initialize_model)
    def initialize_and_repair(vllm_config: Any, **options: Any) -> Any:
        model = initialize_model(vllm_config, **options)
        transfer = vllm_config.ec_transfer_config
        if transfer is not None and transfer.is_ec_consumer:
            keep_deepstack(model, vllm_config)
        return model

    for module in list(sys.modules.values()):  # loaders have the function by name; those that come later, from utils
        if getattr(module, "__dict__", {}).get("initialize_model") is initialize_model:  # getattr would import
            module.initialize_model = initialize_and_repair  # type: ignore[attr-defined]
    _installed = True


def is_installed() -> bool:
    """Whether this process's models are repaired."""
    return _installed


def keep_deepstack(model: Any, vllm_config: Any) -> None:
    """Gives `model` what it lacks to take DeepStack's features; nothing if it lacks nothing."""
    levels = num_deepstack_levels(vllm_config.model_config.hf_config)
    is_off = not getattr(model, "use_deepstack", True) and getattr(model, "deepstack_num_level", None) == 0
    if not levels or not is_off:
        return
    model.use_deepstack = True
    model.deepstack_num_level = levels
    model.multiscale_dim = model.visual_dim * levels
    max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    model.deepstack_input_embeds = [torch.zeros(max_tokens, model.visual_dim) for _ in range(levels)]
    model.deepstack_input_embeds_num_tokens = 0
    logger.warning("ec-producer: %s has no vision tower here; DeepStack stays on", type(model).__name__)
