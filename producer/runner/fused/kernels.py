"""Triton kernels of the fused blocks. Products are accumulated, and softmax and rotary computed, in float32."""

import functools

import torch
import triton
import triton.language as tl

MAX_SHORT_ROWS = 64
"""Rows of the longest sequence that `attend_short` takes."""
_LOG2_E = 1.4426950408889634


def attend_short(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ends: torch.Tensor, *, num_heads: int, scale: float
) -> torch.Tensor:
    """Attention within sequences of at most `MAX_SHORT_ROWS` rows, with rotary embedding, in one pass over memory.

    Args:
        qkv: [num_rows, 3 * num_heads * head_dim], contiguous; queries, keys and values side by side.
        cos: [num_rows, head_dim / 2], contiguous.
        sin: likewise.
        ends: [num_sequences + 1] int32, ascending: where sequences begin and end; any may be empty.
        num_heads: of each of the three.
        scale: of the scores.

    Returns:
        [num_rows, num_heads * head_dim]; zeros behind the last sequence, where attention is to leave no NaN.
    """
    num_rows, width = qkv.shape[0], qkv.shape[1] // 3
    dim = width // num_heads
    out = torch.empty((num_rows, width), dtype=qkv.dtype, device=qkv.device)
    _attend_short[(_num_programs(qkv.device),)](
        qkv,
        cos,
        sin,
        ends,
        out,
        ends.shape[0] - 1,
        num_rows,
        scale * _LOG2_E,
        HEADS=num_heads,
        DIM=dim,
        HALF=max(16, triton.next_power_of_2(dim // 2)),
        WHOLE=max(16, triton.next_power_of_2(dim)),
        ROWS=MAX_SHORT_ROWS,
        ROW=triton.next_power_of_2(width),
    )
    return out


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, num_heads: int) -> None:
    """Rotary embedding of the queries and keys in `qkv`, in place; shapes as for `attend_short`."""
    num_rows, dim = qkv.shape[0], qkv.shape[1] // 3 // num_heads
    rows = 32
    _rotate[(triton.cdiv(num_rows, rows), 2 * num_heads)](
        qkv, cos, sin, num_rows, HEADS=num_heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2), ROWS=rows
    )


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half: [num_rows, 2 * width], contiguous → [num_rows, width]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _silu_and_mul[(num_rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out


@functools.cache
def _num_programs(device: torch.device) -> int:
    """Two a multiprocessor: more do not fit into its registers, and wait."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@triton.jit
def _rotated(at, cos, sin, mask, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of heads, rotated, in float32."""
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _attend_short(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    ends,
    out,
    num_sequences,
    num_rows,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW: tl.constexpr,
):
    """Each program goes from head to head and sequence to sequence, so that empty sequences start no program."""
    last = tl.load(ends + num_sequences)
    task, step = tl.program_id(0), tl.num_programs(0)
    begin = tl.load(ends + task // HEADS, mask=task // HEADS < num_sequences, other=num_rows)
    while begin < last:
        end = tl.load(ends + task // HEADS + 1)
        if end > begin:
            _attend_one(qkv, cos, sin, out, begin, end, task % HEADS, scale, HEADS, DIM, HALF, WHOLE, ROWS)
        task += step
        begin = tl.load(ends + task // HEADS, mask=task // HEADS < num_sequences, other=num_rows)
    row, columns = last + tl.program_id(0), tl.arange(0, ROW)
    while row < num_rows:
        at = out + row * HEADS * DIM + columns
        tl.store(at, tl.zeros((ROW,), dtype=out.dtype.element_ty), mask=columns < HEADS * DIM)
        row += step


@triton.jit
def _attend_one(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    sin,
    out,
    begin,
    end,
    head,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One head of the sequence from `begin` to `end`."""
    width: tl.constexpr = HEADS * DIM
    dtype = qkv.dtype.element_ty
    rows, in_half, in_whole = begin + tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, WHOLE)
    is_row = rows < end
    is_half = is_row[:, None] & (in_half[None, :] < DIM // 2)
    is_whole = is_row[:, None] & (in_whole[None, :] < DIM)
    angles = rows[:, None] * (DIM // 2) + in_half[None, :]
    c = tl.load(cos + angles, mask=is_half, other=0.0).to(tl.float32)
    s = tl.load(sin + angles, mask=is_half, other=0.0).to(tl.float32)
    heads = qkv + rows[:, None] * (3 * width) + head * DIM
    values = tl.load(heads + 2 * width + in_whole[None, :], mask=is_whole, other=0.0)
    q1, q2 = _rotated(heads + in_half[None, :], c, s, is_half, DIM)
    k1, k2 = _rotated(heads + width + in_half[None, :], c, s, is_half, DIM)
    scores = tl.dot(q1.to(dtype), tl.trans(k1.to(dtype)))
    scores = tl.dot(q2.to(dtype), tl.trans(k2.to(dtype)), scores) * scale
    scores = tl.where(is_row[None, :], scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    mixed = tl.dot(weights.to(dtype), values) / tl.sum(weights, 1)[:, None]
    tl.store(out + rows[:, None] * width + head * DIM + in_whole[None, :], mixed.to(dtype), mask=is_whole)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    qkv, cos, sin, num_rows, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_half = tl.arange(0, HALF)
    mask = (rows[:, None] < num_rows) & (in_half[None, :] < DIM // 2)
    angles = rows[:, None] * (DIM // 2) + in_half[None, :]
    c = tl.load(cos + angles, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angles, mask=mask, other=0.0).to(tl.float32)
    at = qkv + rows[:, None] * (3 * HEADS * DIM) + tl.program_id(1) * DIM + in_half[None, :]
    first, second = _rotated(at, c, s, mask, DIM)
    tl.store(at, first.to(qkv.dtype.element_ty), mask=mask)
    tl.store(at + DIM // 2, second.to(qkv.dtype.element_ty), mask=mask)


@triton.jit
def _silu_and_mul(gate_up, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=mask).to(tl.float32)
    tl.store(out + row * width + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)
