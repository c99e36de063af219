"""One module for each model family that the kit can make a tiny checkpoint of.

A maker writes a complete, loadable checkpoint into an existing empty folder. To
add a family, write a module beside this one and name its maker in `MAKERS`.
"""

from collections.abc import Callable
from pathlib import Path

from tests.kit.families import qwen2_5_vl

MAKERS: dict[str, Callable[[Path], None]] = {
    "qwen2_5_vl": qwen2_5_vl.make,
}
