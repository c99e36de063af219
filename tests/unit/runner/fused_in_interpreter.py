"""What the fused kernels compute, by Triton's interpreter: no GPU is needed, and bfloat16 is not to be had.

Run by `test_fused.py` in a process of its own, since Triton decides at its first import. Prints one JSON object of
largest differences from PyTorch's, and from vLLM's own blocks.
"""

import contextlib
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import MMEncoderAttention

from producer.runner.fused import blocks
from producer.runner.fused.kernels import attend_short, multiply_and_gate, norm, rotate, silu_and_mul
from tests.kit.engines import embeddings, engine

NUM_HEADS = 2


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def kernels(dim: int, lengths: list[int], num_rows: int) -> dict[str, float]:
    """Differences over sequences of `lengths`, with NaN in the rows behind them."""
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(num_rows, 3 * NUM_HEADS * dim, generator=draw)
    cos, sin = (torch.randn(num_rows, dim // 2, generator=draw) for _ in range(2))
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    last = int(ends[-1])
    qkv[last:] = float("nan")
    query, key, value = qkv.view(num_rows, 3, NUM_HEADS, dim).unbind(1)
    query, key = rotated(query, cos[:, None], sin[:, None]), rotated(key, cos[:, None], sin[:, None])
    want = torch.zeros(num_rows, NUM_HEADS, dim)
    for begin, end in itertools.pairwise(ends):
        parts = [x[begin:end].transpose(0, 1) for x in (query, key, value)]
        want[begin:end] = F.scaled_dot_product_attention(*parts).transpose(0, 1)
    got = attend_short(qkv, cos, sin, ends, num_heads=NUM_HEADS, scale=dim**-0.5)
    rotate(qkv, cos, sin, num_heads=NUM_HEADS)
    own = qkv.view(num_rows, 3, NUM_HEADS, dim)[:last]
    return {
        f"attention of {dim}": (got - want.flatten(1)).abs().nan_to_num(float("inf")).max().item(),
        f"rotation of {dim}": (own - torch.stack((query, key, value), 1)[:last]).abs().max().item(),
    }


def activation(width: int) -> dict[str, float]:
    draw = torch.Generator().manual_seed(1)
    gate_up, bias = torch.randn(5, 2 * width, generator=draw), torch.randn(2 * width, generator=draw)
    gate, up = (gate_up + bias).chunk(2, -1)
    return {f"activation of {width}": (silu_and_mul(gate_up, bias) - F.silu(gate) * up).abs().max().item()}


def product(num_rows: int, width: int, inner: int) -> dict[str, float]:
    """Of `multiply_and_gate`, with tiles that the rows do not fill."""
    draw = torch.Generator().manual_seed(2)
    x, weight, bias = (
        torch.randn(shape, generator=draw) for shape in ((num_rows, inner), (2 * width, inner), 2 * width)
    )
    gate, up = F.linear(x, weight, bias).chunk(2, -1)
    return {"product": (multiply_and_gate(x, weight, bias) - F.silu(gate) * up).abs().max().item()}


def norms(num_rows: int, width: int) -> dict[str, float]:
    draw = torch.Generator().manual_seed(3)
    x, shift, weight = (torch.randn(shape, generator=draw) for shape in ((num_rows, width), width, width))
    want = F.rms_norm(x + shift, (width,), weight, eps=1e-6)
    return {"norm": (norm(x, shift, weight, 1e-6) - want).abs().max().item()}


def whole_towers() -> dict[str, float]:
    """A real vision tower with and without fused blocks: windows, whole pictures, several items, a video."""
    pack = utils.dispatch_cpu_unquantized_gemm
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: pack(layer, False))
        one = stack.enter_context(engine("qwen2_5_vl", dtype="float32", capture=False))
        patch.setattr(blocks, "_BACKENDS", ("TORCH_SDPA",))
        patch.setattr(MMEncoderAttention, "compute_max_seqlen", lambda _, ends: int((ends[1:] - ends[:-1]).max()))
        steps = [
            [one.image(112, 112, seed=0)],
            [one.image(252, 140, seed=1), one.image(56, 84, seed=2)],
            [one.video(4, 112, 84, seed=3)],
        ]
        wanted = [embeddings(one.eager.launch(step).finish()) for step in steps]
        num_fused = blocks.fuse_blocks(one.encoder._model)
        found = [embeddings(one.eager.launch(step).finish()) for step in steps]
    pairs = [pair for got, want in zip(found, wanted, strict=True) for pair in zip(got, want, strict=True)]
    return {
        "blocks": float(num_fused),
        "tower": max((got - want).abs().max().item() for got, want in pairs),
        "values": max(want.abs().max().item() for _, want in pairs),
    }


def main() -> None:
    found = kernels(80, [64, 64, 16, 0, 48, 32], 300) | kernels(16, [20, 0, 64, 0, 0], 100)
    found |= activation(3456) | activation(96) | product(700, 256, 128) | norms(5, 80)
    print(json.dumps(found | whole_towers()))


if __name__ == "__main__":
    main()
