"""Blocks of windowed vision towers (Qwen2.5-VL's) in eight kernels each, where vLLM's own code takes twenty.

Between blocks goes a pair (what the block before adds, the sum so far), so that the addition is a part of the next
norm. The weights stay where they are, and full attention stays vLLM's.
"""

import functools
from typing import Any

import torch

from producer.runner.fused.kernels import MAX_SHORT_ROWS, attend_short, rotate, silu_and_mul

_CLASS = "Qwen2_5_VisionBlock"
_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
"""Attention backends whose sequences end where they say, in rows."""


def fuse_blocks(model: torch.nn.Module) -> int:
    """Has the blocks of `model` that this module knows run fused; returns how many those are."""
    fused = 0
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) and all(map(_is_known, module)):
            for block in module:
                block.forward = functools.partial(_forward, block, is_last=block is module[-1])
            fused += len(module)
    return fused


def _is_known(block: torch.nn.Module) -> bool:
    if type(block).__name__ != _CLASS:
        return False
    attention: Any = block.attn
    return attention.tp_size == 1 and attention.attn.attn_backend.name in _BACKENDS


def _forward(
    block: Any,
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],  # [num_rows, 1, width]; from the second block on two of them
    cu_seqlens: torch.Tensor,
    rotary_pos_emb_cos: torch.Tensor,
    rotary_pos_emb_sin: torch.Tensor,
    max_seqlen: torch.Tensor,
    sequence_lengths: torch.Tensor | None = None,
    *,
    is_last: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if isinstance(x, tuple):
        normed, total = block.norm1(x[0], residual=x[1])
    else:
        normed, total = block.norm1(x), x
    qkv, _ = block.attn.qkv(normed)
    attended = _attend(
        block.attn, qkv.squeeze(1), cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin, max_seqlen, sequence_lengths
    )
    added, _ = block.attn.proj(attended.unsqueeze(1))
    normed, total = block.norm2(added, residual=total)
    gate_up, _ = block.mlp.gate_up_proj(normed)
    added, _ = block.mlp.down_proj(silu_and_mul(gate_up.squeeze(1)).unsqueeze(1))
    return total + added if is_last else (added, total)


def _attend(
    attention: Any,
    qkv: torch.Tensor,  # [num_rows, 3 * width]
    cu_seqlens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    max_seqlen: torch.Tensor,
    sequence_lengths: torch.Tensor | None,
) -> torch.Tensor:
    """[num_rows, width]"""
    num_heads = attention.num_attention_heads_per_partition
    if int(max_seqlen) <= MAX_SHORT_ROWS:
        return attend_short(qkv, cos, sin, cu_seqlens, num_heads=num_heads, scale=attention.attn.scale)
    rotate(qkv, cos, sin, num_heads=num_heads)
    query, key, value = qkv.view(1, qkv.shape[0], 3, num_heads, -1).unbind(2)
    attended: torch.Tensor = attention.attn(
        query=query,
        key=key,
        value=value,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        sequence_lengths=sequence_lengths,
    )
    return attended.reshape(qkv.shape[0], -1)
