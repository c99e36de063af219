"""Hostile and odd files through real preprocessing processes: each is made into what vLLM makes of it, or refused.

vLLM's own side is what its server does with a chat request, in this process. Files over which it hangs or opens other
files are not shown to it: the table says so (`stricter`).
"""

import base64
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from producer.core import MediaItem, PreparedItem
from producer.errors import InvalidItemError
from producer.item_checks import ItemChecks
from producer.metrics import Metrics
from producer.preprocess import Preprocessor
from tests.kit.clips import sounds
from tests.kit.hostile import ACCEPTED, Case, cases
from tests.kit.photos import photos
from tests.unit.models import arrived, equal, file_item, model_config

Inputs = dict[str, torch.Tensor]
KEY = "ab" * 32
FAMILIES = {"image": "qwen2_5_vl", "video": "qwen2_5_vl", "audio": "qwen2_audio"}
GOOD = {"qwen2_5_vl": photos()["retina.png"], "qwen2_audio": sounds()["chirp.wav"]}
MAX_BYTES = 4 << 30
"""What an item may take in a process, by default."""
MAX_REFUSED_BYTES = 256 << 20
"""What a refused one takes at most: bombs are refused by their headers. Most take less than 10 MiB."""
MAX_S = 30.0
"""What an item may take, by default; on a free machine all of them together take a minute."""
LEAK = re.compile(r"(?<!\d)0x[0-9a-f]{4,}|object at|(^|\s)/\w|\.py\b|Failed to apply|\n|\\x|<", re.IGNORECASE)
"""What a client must not read: an address, a path, raw bytes."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),  # torch's resampler
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),  # vLLM's limit is higher
    pytest.mark.filterwarnings("ignore:(Corrupt|Truncated|Metadata|Palette|Possibly corrupt):UserWarning"),  # Pillow's
]


class Vllm:
    """What vLLM's server does with the media of a chat request, but for the model."""

    def __init__(self, family: str) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        self._config = model_config(family)
        self._processor = MULTIMODAL_REGISTRY.create_processor(self._config)

    def inputs(self, case: Case) -> tuple[str, Inputs]:
        """vLLM's hash of the media and the encoder's inputs. Raises what vLLM raises."""
        from vllm.renderers.chat_utils import parse_chat_messages

        kind = f"{case.modality}_url"
        url = f"data:{case.modality}/any;base64,{base64.b64encode(case.data).decode()}"
        messages: Any = [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]
        _, data, _ = parse_chat_messages(messages, self._config, content_format="openai")
        text = self._processor.dummy_inputs.get_dummy_text({case.modality: 1})
        output = self._processor(text, self._processor.info.parse_mm_data(data))
        return output["mm_hashes"][case.modality][0], _tensors(output["mm_kwargs"][case.modality][0])


class Process:
    """The one process of a preprocessor, seen from outside."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        (self._pid,) = preprocessor.pids
        self._preprocessor = preprocessor
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")  # the peak begins anew
        self._bytes = self._read("VmRSS")

    @property
    def is_alive(self) -> bool:
        return self._preprocessor.pids == {self._pid}

    @property
    def taken_bytes(self) -> int:
        """What it took at most since this was made."""
        return self._read("VmHWM") - self._bytes

    def _read(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self._pid}/status").read_text())
        assert found
        return int(found[1]) << 10


@pytest.fixture(scope="module")
def preprocessors() -> Iterator[dict[str, Preprocessor]]:
    """By family, of one process each."""
    found = {}
    for family, modalities in (("qwen2_5_vl", ("image", "video")), ("qwen2_audio", ("audio",))):
        found[family] = Preprocessor(
            model_config(family), dict.fromkeys(modalities, "metadata"), 1, max_rows=16384, metrics=Metrics()
        )
        found[family].start()
    yield found
    for preprocessor in found.values():
        preprocessor.close()


@pytest.fixture(scope="module")
def vllm() -> dict[str, Vllm]:
    return {family: Vllm(family) for family in GOOD}


async def judged(case: Case, preprocessor: Preprocessor, vllm: Vllm) -> str:
    """What is wrong with what became of a file; empty if nothing is."""
    process, start_s = Process(preprocessor), time.monotonic()
    try:
        item = MediaItem(modality=case.modality, data=case.data)
        ItemChecks(modalities=tuple(FAMILIES), max_item_bytes=32 << 20).check(item)
        prepared = await preprocessor.prepare(KEY, item)
    except InvalidItemError as error:
        problems = _problems_of_refusal(case, error, vllm)
        max_bytes = MAX_REFUSED_BYTES
    else:
        expected = _done(vllm, case)
        problems = {
            "it was not refused": case.outcome != ACCEPTED,
            "vLLM makes another thing of it": expected is None or not _is_same(prepared, *expected),
        }
        max_bytes = MAX_BYTES
    seconds, taken_bytes = time.monotonic() - start_s, process.taken_bytes if process.is_alive else 0
    problems |= {
        f"it took {seconds:.1f} s": seconds > MAX_S,
        f"it took {taken_bytes >> 20} MiB": taken_bytes > max_bytes,
        "the process died": not process.is_alive,
    }
    return ", ".join(problem for problem, there in problems.items() if there)


def _problems_of_refusal(case: Case, error: InvalidItemError, vllm: Vllm) -> dict[str, bool]:
    message = str(error)
    return {
        f"it was refused for {error.reason.value}: {message}": case.outcome != error.reason.value,
        f"the message has {len(message)} characters": not 0 < len(message) <= 400,
        f"the message leaks: {message}": LEAK.search(message) is not None,
        "vLLM takes it": not case.stricter and _done(vllm, case) is not None,
    }


def _is_same(prepared: PreparedItem, mm_hash: str, inputs: Inputs) -> bool:
    """Bit for bit."""
    return prepared.mm_hash == mm_hash and equal(arrived(prepared.inputs), inputs)


def _tensors(item: Any) -> Inputs:
    return {name: torch.as_tensor(value) for name, value in item.get_data().items()}


def _done(vllm: Vllm, case: Case) -> tuple[str, Inputs] | None:
    """None where vLLM raises, whatever it is."""
    try:
        return vllm.inputs(case)
    except Exception:
        return None


@pytest.mark.parametrize("modality", FAMILIES)
async def test_a_file_becomes_what_vllm_makes_of_it_or_is_refused(
    preprocessors: dict[str, Preprocessor], vllm: dict[str, Vllm], modality: str
) -> None:
    family = FAMILIES[modality]
    await preprocessors[family].prepare(KEY, file_item(GOOD[family]))  # imports and buffers belong to nobody
    found = {
        name: await judged(case, preprocessors[family], vllm[family])
        for name, case in cases().items()
        if case.modality == modality
    }
    assert {name: problem for name, problem in found.items() if problem} == {}
    assert (await preprocessors[family].prepare(KEY, file_item(GOOD[family]))).num_rows > 0


def test_the_table_has_both_outcomes_of_each_modality() -> None:
    found = [(case.modality, case.outcome == ACCEPTED) for case in cases().values()]
    assert min(found.count((modality, good)) for modality in FAMILIES for good in (True, False)) >= 25
