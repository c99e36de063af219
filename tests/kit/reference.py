"""What vLLM's own encoder-only instance makes of a picture: the bits that ours must equal.

An offline engine in the producer role saves each embedding through vLLM's
`ECExampleConnector`; `reference_embeddings` reads them. The engine runs in a process of
its own, so that the caller stays free of vLLM's state.

    python -m tests.kit.reference MODEL FOLDER     (FOLDER/0, FOLDER/1, … are images)
"""

import base64
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.kit.servers import ENGINE, ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 240.0


def reference_embeddings(model: Path, images: Sequence[bytes]) -> list[torch.Tensor]:
    """One tensor an image file, in order: [rows, width], in the model's dtype.

    Takes about half a minute, however few the images are.
    """
    with tempfile.TemporaryDirectory(prefix="ec-reference-") as name:
        folder = Path(name)
        for i, image in enumerate(images):
            (folder / str(i)).write_bytes(image)
        _run_engine(model, folder, log=folder / "log")
        return [load_file(_saved(folder, i))["ec_cache"] for i in range(len(images))]


def _run_engine(model: Path, folder: Path, log: Path) -> None:
    command = [sys.executable, "-m", "tests.kit.reference", str(model), str(folder)]
    with log.open("wb") as output:
        ended = subprocess.run(
            command, cwd=REPOSITORY, env=os.environ | ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    if ended.returncode != 0:
        raise RuntimeError(f"vLLM's encoder-only engine failed ({ended.returncode}):\n{log.read_text()[-3000:]}")


def _saved(folder: Path, index: int) -> Path:
    return folder / "saved" / _key(index) / "encoder_cache.safetensors"


def _key(index: int) -> str:
    return f"image-{index}"


def _encode_all(model: str, folder: Path) -> None:
    """In the engine's process: encode every image of the folder, each in a request of its own."""
    from vllm import LLM, SamplingParams

    engine = LLM(**_engine_settings(model, folder))
    for i in range(len([path for path in folder.iterdir() if path.name.isdigit()])):
        engine.chat(_message(folder, i), SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)


def _engine_settings(model: str, folder: Path) -> dict[str, object]:
    from vllm.config import ECTransferConfig

    transfer = ECTransferConfig(
        ec_connector="ECExampleConnector",
        ec_role="ec_producer",
        ec_connector_extra_config={"shared_storage_path": str(folder / "saved")},
    )
    encoder_only = {"mm_encoder_only": True, "enable_prefix_caching": False, "ec_transfer_config": transfer}
    return {"model": model} | ENGINE | encoder_only


def _message(folder: Path, index: int) -> list[dict[str, object]]:
    """A chat, so that vLLM itself decodes the bytes; the uuid names the file that it saves."""
    data = base64.b64encode((folder / str(index)).read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/any;base64,{data}"}, "uuid": _key(index)}
    return [{"role": "user", "content": [part]}]


if __name__ == "__main__":
    _encode_all(sys.argv[1], Path(sys.argv[2]))
