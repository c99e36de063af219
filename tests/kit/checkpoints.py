"""Tiny, seeded checkpoints, made on this machine: the same bytes every time, nothing downloaded.

    python -m tests.kit.checkpoints FAMILY OUT

`cached_checkpoint` is what tests and the demo use: it makes a checkpoint once and
keeps it under `.cache/checkpoints`, in a folder named after everything that decides
its bytes. Making is atomic, so two processes may ask at once.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

FAMILIES_DIR = Path(__file__).parent / "families"
CACHE_DIR = Path(__file__).parents[2] / ".cache" / "checkpoints"
LIBRARIES = ("safetensors", "tokenizers", "torch", "transformers")


def make_checkpoint(family: str, out: Path) -> Path:
    """Make a checkpoint of `family` at `out`, which appears whole or not at all.

    An `out` that is there already is left as it is. Raises `ValueError` for an
    unknown family.
    """
    from tests.kit.families import MAKERS  # here, since it imports torch and transformers

    if family not in MAKERS:
        raise ValueError(f"family {family!r} is unknown; known are {', '.join(sorted(MAKERS))}")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        MAKERS[family](draft)
        _move(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


def _move(draft: Path, out: Path) -> None:
    """Put the finished draft in place; where another process was quicker, its copy stands."""
    draft.chmod(0o755)  # mkdtemp's folders are private, checkpoints are not
    try:
        draft.rename(out)
    except OSError:
        if not (out / "config.json").exists():
            raise


def cached_checkpoint(family: str, cache: Path = CACHE_DIR) -> Path:
    """The checkpoint of `family`, made if it is not in `cache` yet."""
    out = cache / f"{family}-{_fingerprint()}"
    return out if out.is_dir() else make_checkpoint(family, out)


def _fingerprint() -> str:
    """Names what decides the bytes: the makers' source and the libraries that write them."""
    digest = hashlib.sha256()
    for source in sorted(FAMILIES_DIR.glob("*.py")):
        digest.update(source.read_bytes())
    for library in LIBRARIES:
        digest.update(f"{library}=={version(library)}\n".encode())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kit.checkpoints", description="Make a tiny checkpoint.")
    parser.add_argument("family", metavar="FAMILY")
    parser.add_argument("out", metavar="OUT", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        print(make_checkpoint(arguments.family, arguments.out))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
