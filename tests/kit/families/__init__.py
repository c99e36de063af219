"""One module for each model family that the kit can make a tiny checkpoint of.

A maker writes a complete, loadable checkpoint into an existing empty folder. To
add a family, write a module beside this one and name its maker in `MAKERS`.
"""

from collections.abc import Callable
from pathlib import Path

from tests.kit.families import (
    exaone4_5,
    gemma3,
    idefics3,
    internvl,
    minicpm_v4_6,
    qwen2_5_vl,
    qwen2_audio,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
)

MAKERS: dict[str, Callable[[Path], None]] = {
    "exaone4_5": exaone4_5.make,
    "gemma3": gemma3.make,
    "idefics3": idefics3.make,
    "internvl": internvl.make,
    "minicpm_v4_6": minicpm_v4_6.make,
    "qwen2_5_vl": qwen2_5_vl.make,
    "qwen2_audio": qwen2_audio.make,
    "qwen2_vl": qwen2_vl.make,
    "qwen3_5": qwen3_5.make,
    "qwen3_vl": qwen3_vl.make,
    "smolvlm": idefics3.make_smolvlm,
}
