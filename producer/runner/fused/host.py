"""Parts of vision towers in fewer calls on the host, where vLLM's own code goes through small operators one by one.

What they compute is what vLLM's own code does, bit for bit. Parts are known by their class, so that they are fused in
any model that is made of them. Where a part is given what its fused form does not take, its own code runs.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.attention import MMEncoderAttention
from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm

from producer.runner.fused.recorded import RecordedTower

_ATTENTION = "Qwen2_5_VisionAttention"
_PATCHES = ("Qwen2VisionPatchEmbed", "Qwen2_5_VisionPatchEmbed", "Qwen3_VisionPatchEmbed")
_CHUNK_ROWS = 256
"""Patches that are normalized at a time, so that what lies between is in the cache and not new memory."""
_TABLES = "ec_producer_tables"
"""Attribute of angles that are remembered: what queries and keys are multiplied with, by repeats."""
_MAX_PLANS = 32
"""Layouts of steps of which something is remembered."""
_MAX_REMEMBERED_ROWS = 8192
"""Of a layout, before patches are merged: about 200 bytes each."""


def fuse_parts(model: torch.nn.Module) -> tuple[int, bool]:
    """Has the parts of `model` that this module knows run fused.

    Returns:
        How many those are, and whether the model takes compact pixels (`producer.pixels`) as they are from here on.
    """
    attentions = [one for one in model.modules() if isinstance(one, MMEncoderAttention)]
    attentions = [one for one in attentions if one.attn_backend.name == "TORCH_SDPA"]
    rotary = [one for one in model.modules() if type(one).__name__ == _ATTENTION and one.attn in attentions]
    towers = [one for one in model.modules() if _takes_bytes(one)]
    for attention in attentions:
        attention._forward_sdpa = functools.partial(_attend, attention)
    for attention in rotary:
        attention.forward = functools.partial(_rotate_and_attend, attention)
    for tower in towers:
        tower.input_norm.forward = functools.partial(_normalize_bytes, tower.input_norm, tower.patch_embed)
        tower.prepare_encoder_metadata = _remembering(tower.prepare_encoder_metadata)
        tower.requires_grad_(False).forward = RecordedTower(tower.forward)
    return len(attentions) + len(rotary) + len(towers), bool(towers)


def _takes_bytes(module: Any) -> bool:
    """Whether `module` is a tower that brings the bytes of pixels to the processor's mean and deviation itself."""
    patches = getattr(module, "patch_embed", None)
    return type(patches).__name__ in _PATCHES and isinstance(module.input_norm, FusedMMInputNorm)


def _normalize_bytes(norm: Any, patches: Any, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`FusedMMInputNorm.forward`, which also takes compact pixels.

    Args:
        norm: of which the forward is.
        patches: the projection behind it.
        pixels: [num_rows, channels * frames * area]; without frames where those of each patch are equal.
        dtype: of what is returned, with frames.
    """
    if pixels.dtype != torch.uint8:
        own: torch.Tensor = type(norm).forward(norm, pixels, dtype)
        return own
    weight, bias = norm.weight.view(1, -1, 1, 1), norm.bias.view(1, -1, 1, 1)
    each = pixels.reshape(len(pixels), norm.channel, -1, patches.patch_size**2)
    out = torch.empty((*each.shape[:2], patches.temporal_patch_size, each.shape[3]), dtype=dtype)
    for some, room in zip(each.split(_CHUNK_ROWS), out.split(_CHUNK_ROWS), strict=True):
        room.copy_(some.float().mul_(weight).add_(bias))
    return out.flatten(1)


def _remembering(prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`prepare_encoder_metadata` that knows what it last said of small steps: it does so much for any that it shows."""

    @functools.lru_cache(_MAX_PLANS)
    def remembered(grids: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
        found = prepare([list(grid) for grid in grids])
        for tensor in found.values():
            if isinstance(tensor, torch.Tensor):
                setattr(tensor, _TABLES, {})  # it stays as it is, and so does what is made of it
        return found

    def metadata(grids: Sequence[Sequence[int]], **others: Any) -> dict[str, Any]:
        if others or sum(map(math.prod, grids)) > _MAX_REMEMBERED_ROWS:
            return prepare(grids, **others)
        return dict(remembered(tuple(map(tuple, grids))))

    return metadata


def _attend(
    attention: Any,
    query: torch.Tensor,  # [1, num_rows, num_heads, head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention within sequences, those of equal length in one call."""
    ends = () if cu_seqlens is None else tuple(cu_seqlens.tolist())
    if not ends or query.ndim != 4 or query.shape[:2] != (1, ends[-1]):
        own: torch.Tensor = type(attention)._forward_sdpa(attention, query, key, value, cu_seqlens)
        return own
    plan, parts = _plan(ends), (query[0], key[0], value[0])
    if plan.order is not None:
        parts = (parts[0][plan.order], parts[1][plan.order], parts[2][plan.order])
    attended = []
    for count, length, group in zip(plan.counts, plan.lengths, zip(*map(plan.split, parts), strict=True), strict=True):
        q, k, v = (part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in group)
        is_grouped = bool(q.shape[1] != k.shape[1])  # a tensor while a step is recorded
        found = F.scaled_dot_product_attention(q, k, v, scale=attention.scale, enable_gqa=is_grouped)
        attended.append(found.transpose(1, 2).flatten(0, 1))
    rows = attended[0] if len(attended) == 1 else torch.cat(attended)
    return (rows if plan.places is None else rows[plan.places]).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How sequences of equal length come to lie side by side: `counts` of `lengths`."""

    counts: list[int]
    lengths: list[int]
    order: torch.Tensor | None
    """Which row comes where; None where they lie so already."""
    places: torch.Tensor | None
    """Where each row is then."""

    def split(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """What of `rows` belongs to each length."""
        if len(self.counts) == 1:
            return (rows,)
        sizes = [count * length for count, length in zip(self.counts, self.lengths, strict=True)]
        parts: tuple[torch.Tensor, ...] = rows.split(sizes)
        return parts


@functools.lru_cache(_MAX_PLANS)
def _plan(ends: Sequence[int]) -> _Plan:
    """`ends` are 0 and where each sequence ends, in rows."""
    lengths = [end - begin for begin, end in itertools.pairwise(ends) if end > begin]
    counts = Counter(lengths)
    by_length = list(counts)
    if len(list(itertools.groupby(lengths))) == len(counts):
        return _Plan(list(counts.values()), by_length, None, None)
    of_rows = torch.tensor([by_length.index(length) for length in lengths for _ in range(length)])
    order = of_rows.argsort(stable=True)
    return _Plan(list(counts.values()), by_length, order, order.argsort())


def _tables(cos: torch.Tensor, sin: torch.Tensor, repeats: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What [num_rows, repeats * head_dim] is multiplied with: each half of a head with itself, and the other half."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = getattr(cos, _TABLES, {})
    if repeats not in made:
        made[repeats] = torch.cat((cos, cos), 1).repeat(1, repeats), torch.cat((-sin, sin), 1).repeat(1, repeats)
    return made[repeats]


def _rotate_and_attend(
    attention: Any,
    x: torch.Tensor,  # [num_rows, 1, width]
    cu_seqlens: torch.Tensor,
    rotary_pos_emb_cos: torch.Tensor | None,  # [num_rows, head_dim / 2]
    rotary_pos_emb_sin: torch.Tensor | None,
    max_seqlen: torch.Tensor,
    sequence_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `Qwen2_5_VisionAttention.forward`; queries and keys are rotated where they lie, whole rows at a time."""
    cos, sin = rotary_pos_emb_cos, rotary_pos_emb_sin
    if x.shape[1] != 1 or cos is None or sin is None or cos.dtype != x.dtype:
        own: torch.Tensor = type(attention).forward(attention, x, cu_seqlens, cos, sin, max_seqlen, sequence_lengths)
        return own
    head_dim, num_heads = attention.hidden_size_per_attention_head, attention.num_attention_heads_per_partition
    qkv = attention.qkv(x)[0].view(len(x), 3, num_heads, head_dim)
    both = qkv[:, :2].reshape(len(x), -1)
    with_itself, with_other = _tables(cos, sin, 2 * num_heads)
    other = both.view(len(x), -1, head_dim).roll(head_dim // 2, -1).view_as(both)
    rotated = (both * with_itself).add_(other.mul_(with_other)).view(len(x), 2, num_heads, head_dim)
    attended = attention.attn(
        query=rotated[:, 0].unsqueeze(0),
        key=rotated[:, 1].unsqueeze(0),
        value=qkv[:, 2].unsqueeze(0),
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        sequence_lengths=sequence_lengths,
    )
    output: torch.Tensor = attention.proj(attended.flatten(2).transpose(0, 1))[0]
    return output
