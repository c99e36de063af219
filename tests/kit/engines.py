"""Encoders with their graphs, and items of any size for them, in the test's own process.

Without a GPU, graphs are emulated: see `tests.kit.emulated`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from producer.core import DecodedForm, MediaItem, PreparedItem
from producer.errors import ServiceError
from producer.media_limits import MediaLimits
from producer.metrics import Metrics
from tests.kit import emulated
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.samples import total

MAX_ITEMS = 32
SIDE = {"qwen2_5_vl": 28, "qwen2_vl": 28, "qwen3_vl": 32, "qwen3_5": 32}
"""Pixels of a row's side, in families whose pictures may have any size."""


def prepared_item(work: Callable[[Any], Any], media: MediaItem) -> PreparedItem:
    """A media item as admission hands it to the encoder; `work` is what runs in a preprocessing process."""
    from producer import preprocess_worker

    prepared = preprocess_worker.prepared(work(preprocess_worker.request(media)))
    return PreparedItem(
        key="00" * 32,
        modality=media.modality,
        num_rows=prepared.num_rows,
        content_part=prepared.content_part,
        inputs=prepared.inputs,
    )


@dataclass
class Engine:
    """One model's encoder. `runner` replays graphs where they fit; `eager` never does."""

    encoder: Any
    graphs: Any
    runner: Any
    eager: Any
    metrics: Metrics
    work: Callable[[Any], Any]
    family: str

    def image(self, height: int, width: int, seed: int) -> PreparedItem:
        """A picture of noise of that many pixels."""
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return self.prepare(
            MediaItem(modality="image", data=pixels.tobytes(), decoded=DecodedForm(shape=pixels.shape, rate_hz=0))
        )

    def video(self, num_frames: int, height: int, width: int, seed: int) -> PreparedItem:
        """A video of noise."""
        pixels = np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
        form = DecodedForm(shape=pixels.shape, rate_hz=2.0)
        return self.prepare(MediaItem(modality="video", data=pixels.tobytes(), decoded=form))

    def rows(self, num_rows: int, seed: int) -> PreparedItem:
        """A picture of `num_rows` rows, in families whose pictures may have any size; as square as that allows."""
        side = SIDE[self.family]
        height = max(divisor for divisor in range(1, int(num_rows**0.5) + 1) if num_rows % divisor == 0)
        item = self.image(height * side, num_rows // height * side, seed)
        assert item.num_rows == num_rows, (item.num_rows, num_rows)
        return item

    def prepare(self, media: MediaItem) -> PreparedItem:
        return prepared_item(self.work, media)

    def sample(self) -> PreparedItem:
        """A small item of the model's first modality."""
        from producer.decode import sample

        return self.prepare(sample(next(iter(self.encoder.forms))))

    def count(self, name: str, **labels: str) -> float:
        return total(self.metrics.registry, name, **labels)


def embeddings(outcomes: Sequence[torch.Tensor | ServiceError]) -> list[torch.Tensor]:
    for outcome in outcomes:
        if isinstance(outcome, ServiceError):
            raise outcome
    return [outcome.clone() for outcome in outcomes if isinstance(outcome, torch.Tensor)]


@contextmanager
def engine(
    family: str,
    *,
    backend: str = "auto",
    fidelity: str = "fast",
    compile: bool = False,
    dtype: str = "auto",
    graph_rows: int = 4096,
    capture: bool = True,
) -> Iterator[Engine]:
    """An engine of the tiny checkpoint of `family`, with all its graphs captured unless told otherwise."""
    from producer import preprocess_worker
    from producer.runner.encoder import VllmEncoder
    from producer.runner.recorder import CudaRecorder
    from producer.runner.slot_ring import SlotRing
    from producer.runner.steps import StepRunner

    size = {"shortest_edge": 28 * 28, "longest_edge": 16384 * 32 * 32}
    encoder = VllmEncoder(
        model=str(cached_checkpoint(family)),
        dtype=dtype,
        mm_encoder_attn_backend=backend,
        revision="",
        trust_remote_code=False,
        mm_processor_kwargs={"size": size} if family in SIDE else {},
        media_io_kwargs={},
        modalities=("image", "video", "audio"),
        fidelity=fidelity,
        compile_mm_encoder=compile,
    )
    try:
        encoder.load()
        recorder = emulated.Recorder() if encoder.device.type == "cpu" else CudaRecorder()
        graphs = encoder.graphs(graph_rows, MAX_ITEMS, recorder)
        if capture and graphs is not None:
            graphs.rehearse()
            graphs.capture()
        ring, metrics = SlotRing.allocate(3, 32 << 20, encoder.device), Metrics()
        common = {"decode": encoder.decode, "embed": encoder.embed, "ring": ring, "exact": fidelity == "exact"}
        yield Engine(
            encoder=encoder,
            graphs=graphs,
            runner=StepRunner(**common, graphs=graphs, why_no_graphs="", metrics=metrics),
            eager=StepRunner(**common, graphs=None, why_no_graphs="eager", metrics=Metrics()),
            metrics=metrics,
            work=preprocess_worker.make(encoder.model_config, encoder.forms, MediaLimits()),
            family=family,
        )
    finally:
        encoder.close()
