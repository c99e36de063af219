"""A checkpoint with the vision tower of Qwen2.5-VL-3B and random weights, made on this machine: nothing downloaded.

    python -m bench.real_shape OUT

Tokenizer and processor are the tiny checkpoint's. The language model has the real shape in its configuration and no
weights, so only an encoder can load it.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.kit.checkpoints import cached_checkpoint

DEPTH, HIDDEN, INTERMEDIATE, OUT_HIDDEN, PATCH = 32, 1280, 3420, 2048, 14
VISION = {
    "depth": DEPTH,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_heads": 16,
    "out_hidden_size": OUT_HIDDEN,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
TEXT = {
    "hidden_size": OUT_HIDDEN,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "layer_types": ["full_attention"] * 36,
}
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}


def make(out: Path, device: str = "cpu") -> Path:
    """Writes the checkpoint to `out`, 1.3 GB; what is there already is left as it is. `device` draws the numbers."""
    if (out / "model.safetensors").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    for path in cached_checkpoint("qwen2_5_vl").iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, out)
    config = json.loads((out / "config.json").read_text())
    config["text_config"] |= TEXT
    config["text_config"]["rope_parameters"]["mrope_section"] = [16, 24, 24]
    config["vision_config"] |= VISION
    (out / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        _let_any_size(out / name)
    save_file(_weights(torch.Generator(device).manual_seed(0), device), out / "model.safetensors")
    return out


def _let_any_size(path: Path) -> None:
    def widened(value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {
            key: SIZE[key] if key in SIZE else {"min_pixels": 56 * 56, "max_pixels": 12_845_056}.get(key, widened(one))
            for key, one in value.items()
        }

    path.write_text(json.dumps(widened(json.loads(path.read_text())), indent=1))


def _weights(generator: torch.Generator, device: str) -> dict[str, torch.Tensor]:
    def linear(name: str, rows: int, columns: int, bias: bool = True) -> dict[str, torch.Tensor]:
        found = {f"{name}.weight": draw(rows, columns) / columns**0.5}
        return found | ({f"{name}.bias": draw(rows) * 0.02} if bias else {})

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def norm(name: str, width: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1 + draw(width) * 0.02}

    patch = 3 * 2 * PATCH * PATCH
    found = {"visual.patch_embed.proj.weight": draw(HIDDEN, 3, 2, PATCH, PATCH) / patch**0.5}
    for index in range(DEPTH):
        block = f"visual.blocks.{index}"
        found |= norm(f"{block}.norm1", HIDDEN) | norm(f"{block}.norm2", HIDDEN)
        found |= linear(f"{block}.attn.qkv", 3 * HIDDEN, HIDDEN) | linear(f"{block}.attn.proj", HIDDEN, HIDDEN)
        found |= linear(f"{block}.mlp.gate_proj", INTERMEDIATE, HIDDEN)
        found |= linear(f"{block}.mlp.up_proj", INTERMEDIATE, HIDDEN)
        found |= linear(f"{block}.mlp.down_proj", HIDDEN, INTERMEDIATE)
    found |= norm("visual.merger.ln_q", HIDDEN)
    found |= linear("visual.merger.mlp.0", 4 * HIDDEN, 4 * HIDDEN)
    found |= linear("visual.merger.mlp.2", OUT_HIDDEN, 4 * HIDDEN)
    return {name: tensor.contiguous().cpu() for name, tensor in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.real_shape", description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT", type=Path)
    out = parser.parse_args().out
    print(make(out, "cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
