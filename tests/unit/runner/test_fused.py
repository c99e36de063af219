"""The fused blocks: their kernels, a whole tower made of them, and MLPs of odd widths."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from producer.runner.fused.widths import MULTIPLE, pad_mlps


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.runner.fused_in_interpreter"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("what", ["attention of 80", "attention of 16", "rotation of 80", "rotation of 16"])
def test_attention_is_pytorchs_and_leaves_zeros_behind_the_last_sequence(found: dict[str, float], what: str) -> None:
    assert found[what] < 1e-5


@pytest.mark.parametrize("width", [3456, 96])
def test_the_activation_is_pytorchs(found: dict[str, float], width: int) -> None:
    assert found[f"activation of {width}"] < 1e-5


def test_the_norm_is_pytorchs(found: dict[str, float]) -> None:
    assert found["norm"] < 1e-5


def test_product_and_activation_in_one_are_pytorchs(found: dict[str, float]) -> None:
    assert found["product"] < 1e-2  # values of about 100


def test_a_tower_of_fused_blocks_encodes_as_vllms_own(found: dict[str, float]) -> None:
    assert found["blocks"] == 2
    assert found["tower"] < 1e-4 < found["values"]


class Linear(torch.nn.Module):
    def __init__(self, rows: int, columns: int, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns))
        self.bias = torch.nn.Parameter(torch.randn(rows)) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Mlp(torch.nn.Module):
    def __init__(self, width: int, inner: int, *, has_bias: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = Linear(2 * inner, width, has_bias=has_bias)
        self.down_proj = Linear(width, inner, has_bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


@pytest.mark.parametrize("has_bias", [True, False])
def test_an_mlp_of_an_odd_width_gets_zeros_and_computes_the_same(has_bias: bool) -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(16, 130, has_bias=has_bias), torch.randn(5, 16)
    with torch.no_grad():
        want = mlp(x)
        assert pad_mlps(torch.nn.Sequential(mlp)) == 1
        torch.testing.assert_close(mlp(x), want)
    assert mlp.down_proj.weight.shape == (16, 2 * MULTIPLE)
    assert mlp.gate_up_proj.weight.shape == (4 * MULTIPLE, 16)
    assert not mlp.down_proj.weight[:, 130:].any()


def test_other_mlps_stay_as_they_are() -> None:
    even, odd, packed = Mlp(16, MULTIPLE), Mlp(16, 70), Mlp(16, 70)
    odd.down_proj = Linear(16, 60, has_bias=True)  # no half of what comes before it
    packed.down_proj.weight = torch.nn.Parameter(torch.zeros(16, 70, dtype=torch.int8), requires_grad=False)
    kept = [module.gate_up_proj.weight for module in (even, odd, packed)]
    assert pad_mlps(torch.nn.ModuleList([even, odd, packed])) == 0
    assert all(module.gate_up_proj.weight is weight for module, weight in zip((even, odd, packed), kept, strict=True))
