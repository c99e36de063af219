"""Blocks of windowed vision towers (Qwen2.5-VL's) in eight kernels each, where vLLM's own code takes twenty.

What the blocks add up is one tensor, to which products are added where it lies. Biases that only shift it are summed
up beforehand, and added where it is read. The weights stay where they are, and full attention stays vLLM's.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from producer.runner.fused.kernels import (
    MAX_SHORT_ROWS,
    MLP_TILE,
    attend_short,
    multiply_and_gate,
    norm,
    rotate,
    silu_and_mul,
)
from producer.runner.fused.widths import is_plain

_CLASS = "Qwen2_5_VisionBlock"
_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
"""Attention backends whose sequences end where they say, in rows."""
_MANY_ROWS = 2048
"""From here on `multiply_and_gate` is faster than a product and `silu_and_mul`."""
_HOPPER = 9


@dataclass(frozen=True, slots=True)
class _Shifts:
    """What is lacking in the sum at two norms and at the end of a block, [width] float32 each: biases so far."""

    at_attention: torch.Tensor
    at_mlp: torch.Tensor
    at_end: torch.Tensor


def fuse_blocks(model: torch.nn.Module) -> int:
    """Has the blocks of `model` that this module knows run fused; returns how many those are."""
    fused = 0
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) and all(map(_is_known, module)):
            shift = torch.zeros_like(_linears(module[0])[1].bias, dtype=torch.float32)
            for block in module:
                shifts = _shifts(block, shift)
                block.forward = functools.partial(_forward, block, shifts, is_last=block is module[-1])
                shift = shifts.at_end
            fused += len(module)
    return fused


def _is_known(block: torch.nn.Module) -> bool:
    if type(block).__name__ != _CLASS:
        return False
    attention: Any = block.attn
    return (
        attention.tp_size == 1
        and attention.attn.attn_backend.name in _BACKENDS
        and all(is_plain(linear) and linear.bias is not None for linear in _linears(block))
    )


def _linears(block: Any) -> tuple[Any, Any, Any, Any]:
    return block.attn.qkv, block.attn.proj, block.mlp.gate_up_proj, block.mlp.down_proj


def _shifts(block: Any, shift: torch.Tensor) -> _Shifts:
    _, proj, _, down = _linears(block)
    at_mlp = shift + proj.bias.data.float()
    return _Shifts(shift, at_mlp, at_mlp + down.bias.data.float())


def _forward(
    block: Any,
    shifts: _Shifts,
    x: torch.Tensor,  # [num_rows, 1, width]; written to
    cu_seqlens: torch.Tensor,
    rotary_pos_emb_cos: torch.Tensor,
    rotary_pos_emb_sin: torch.Tensor,
    max_seqlen: torch.Tensor,
    sequence_lengths: torch.Tensor | None = None,
    *,
    is_last: bool,
) -> torch.Tensor:
    qkv, proj, gate_up, down = _linears(block)
    total = x.squeeze(1)
    normed = norm(total, shifts.at_attention, block.norm1.weight, block.norm1.variance_epsilon)
    products = F.linear(normed, qkv.weight, qkv.bias)
    attended = _attend(
        block.attn, products, cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin, max_seqlen, sequence_lengths
    )
    total.addmm_(attended, proj.weight.t())
    normed = norm(total, shifts.at_mlp, block.norm2.weight, block.norm2.variance_epsilon)
    total.addmm_(_gate(normed, gate_up), down.weight.t())
    if is_last:
        total.add_(shifts.at_end)
    return x


def _gate(x: torch.Tensor, gate_up: Any) -> torch.Tensor:
    """[num_rows, width] → [num_rows, inner width]"""
    _, columns, inner = MLP_TILE
    fits = gate_up.weight.shape[0] % (2 * columns) == 0 and x.shape[1] % inner == 0 and x.dtype == torch.bfloat16
    if fits and len(x) >= _MANY_ROWS and torch.cuda.get_device_capability(x.device)[0] == _HOPPER:
        return multiply_and_gate(x, gate_up.weight, gate_up.bias)
    return silu_and_mul(F.linear(x, gate_up.weight), gate_up.bias)


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
