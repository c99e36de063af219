"""Triton kernels of the fused blocks. Products are accumulated, and all else is computed, in float32."""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_SHORT_ROWS = 64
"""Rows of the longest sequence that `attend_short` takes."""
MLP_TILE = (128, 128, 64)
"""Rows, columns and inner size of what `multiply_and_gate` computes at once; its widths are multiples of these."""
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
    num_processors, at_once = _num_processors(qkv.device), {}
    if num_rows // MAX_SHORT_ROWS * num_heads > 8 * num_processors:  # many rounds: with fewer registers a third fits in
        at_once = {"maxnreg": 160}
    _attend_short[((3 if at_once else 2) * num_processors,)](
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
        ENDS=triton.next_power_of_2(ends.shape[0]),
        **at_once,
    )
    return out


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, num_heads: int) -> None:
    """Rotary embedding of the queries and keys in `qkv`, in place; shapes as for `attend_short`."""
    num_rows, dim = qkv.shape[0], qkv.shape[1] // 3 // num_heads
    rows = 32
    _rotate[(triton.cdiv(num_rows, rows), 2 * num_heads)](
        qkv, cos, sin, num_rows, HEADS=num_heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2), ROWS=rows
    )


def norm(x: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of `x` + `shift`: [num_rows, width], contiguous, and [width] float32 → [num_rows, width]."""
    num_rows, width = x.shape
    out, rows = torch.empty_like(x), 2
    _norm[(triton.cdiv(num_rows, rows),)](
        x, shift, weight, out, eps, num_rows, WIDTH=width, LANES=triton.next_power_of_2(width), ROWS=rows
    )
    return out


def silu_and_mul(gate_up: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half, of the sum: [num_rows, 2 * width], contiguous, and [2 * width]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _silu_and_mul[(num_rows, triton.cdiv(width, block))](gate_up, bias, out, width, BLOCK=block)
    return out


def multiply_and_gate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul(x @ weight.T, bias)`, for the tensor cores of Hopper, without the product in memory.

    Args:
        x: [num_rows, inner], contiguous.
        weight: [2 * width, inner], contiguous.
        bias: [2 * width].
    """
    rows, columns, inner = MLP_TILE
    num_rows, width = x.shape[0], weight.shape[0] // 2
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    num_tiles = triton.cdiv(num_rows, rows) * (width // columns)
    _multiply_and_gate[(min(num_tiles, _num_processors(x.device)),)](
        TensorDescriptor.from_tensor(x, [rows, inner]),
        TensorDescriptor.from_tensor(weight, [columns, inner]),
        bias,
        TensorDescriptor.from_tensor(out, [rows, columns]),
        num_rows,
        width,
        INNER=x.shape[1],
        ROWS=rows,
        COLUMNS=columns,
        STEP=inner,
        num_warps=8,
        num_stages=3,
    )
    return out


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


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
    ENDS: tl.constexpr,
):
    """Each program goes from head to head and sequence to sequence; the empty ones behind the last start none."""
    width: tl.constexpr = HEADS * DIM
    dtype = qkv.dtype.element_ty
    index, in_half, in_whole = tl.arange(0, ENDS), tl.arange(0, HALF), tl.arange(0, WHOLE)
    last = tl.load(ends + num_sequences)
    begins = tl.load(ends + index, mask=index < num_sequences, other=last)
    for task in range(tl.program_id(0), tl.sum((begins < last).to(tl.int32), 0) * HEADS, tl.num_programs(0)):
        head = task % HEADS
        begin, end = tl.load(ends + task // HEADS), tl.load(ends + task // HEADS + 1)
        rows = begin + tl.arange(0, ROWS)
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
    row, columns = last + tl.program_id(0), tl.arange(0, ROW)
    while row < num_rows:
        tl.store(out + row * width + columns, tl.zeros((ROW,), dtype=dtype), mask=columns < width)
        row += tl.num_programs(0)


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
def _norm(  # type: ignore[no-untyped-def]
    x, shift, weight, out, eps, num_rows, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    is_column = columns < WIDTH
    at = rows[:, None] * WIDTH + columns[None, :]
    mask = (rows[:, None] < num_rows) & is_column[None, :]
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    values += tl.load(shift + columns, mask=is_column, other=0.0)[None, :]
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    scale = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)[:, None]
    tl.store(out + at, (values * scale * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated(gate, up):  # type: ignore[no-untyped-def]
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_and_mul(gate_up, bias, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    at = gate_up + row * 2 * width + columns
    gate = tl.load(at, mask=mask).to(tl.float32) + tl.load(bias + columns, mask=mask).to(tl.float32)
    up = tl.load(at + width, mask=mask).to(tl.float32) + tl.load(bias + width + columns, mask=mask).to(tl.float32)
    tl.store(out + row * width + columns, _gated(gate, up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _multiply_and_gate(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    num_rows,
    width,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Programs go from tile to tile, four rows of tiles at a time, so that both factors stay in the cache."""
    down, across = tl.cdiv(num_rows, ROWS), width // COLUMNS
    for task in tl.range(tl.program_id(0), down * across, tl.num_programs(0), warp_specialize=True):
        group = task // (4 * across) * 4
        height = min(down - group, 4)
        row, column = (group + task % (4 * across) % height) * ROWS, task % (4 * across) // height * COLUMNS
        gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, INNER, STEP):
            part = x.load([row, k])
            gate = tl.dot(part, weight.load([column, k]).T, gate)
            up = tl.dot(part, weight.load([width + column, k]).T, up)
        columns = column + tl.arange(0, COLUMNS)
        gate += tl.load(bias + columns).to(tl.float32)[None, :]
        up += tl.load(bias + width + columns).to(tl.float32)[None, :]
        out.store([row, column], _gated(gate, up).to(bias.dtype.element_ty))
