"""Small encoders that implement vLLM's `SupportsEncoderCudaGraph`, for what no tiny checkpoint of this vLLM has.

Left out: attention and its metadata, other modalities than images, padding rules, and all that a weight needs. Numbers
are whole, so that sums are the same in any order.
"""

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch
from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.v1.worker.encoder_cudagraph_defs import (
    ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)

WIDTH = 6
DEPTH = 4
"""Elements of a row's pixels."""

Kwargs = dict[str, Any]


class OnePath(torch.nn.Module, SupportsEncoderCudaGraph):
    """Each row of `pixels` [num_rows, depth] becomes a row of the embedding; `rows` [num_items] says whose they are."""

    axes: tuple[tuple[Hashable, ...], ...] = ()
    paths: ClassVar = {"default": EncoderCudaGraphPathConfig()}

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=["image"],
            buffer_keys=["pixels"],
            out_hidden_size=WIDTH,
            paths=self.paths,
            capture_axes=self.axes,
        )

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: Kwargs) -> list[EncoderItemSpec]:
        return [EncoderItemSpec(input_size=rows, output_tokens=rows) for rows in mm_kwargs["rows"].tolist()]

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, items: int, frames: int, device: Any, dtype: Any, path: str, axis_keys: Any
    ) -> EncoderCudaGraphCaptureInputs:
        return EncoderCudaGraphCaptureInputs({"pixels": torch.zeros(token_budget, DEPTH, device=device, dtype=dtype)})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: Kwargs, items: int, frames: int, path: str
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers({"pixels": mm_kwargs["pixels"]})

    def encoder_cudagraph_forward(self, inputs: Kwargs, path: str = "default") -> torch.Tensor:
        return encoded(inputs["pixels"], 1)

    def expected(self, item: Kwargs) -> torch.Tensor:
        """The embedding of one item."""
        return encoded(item["pixels"], 1)

    def item(self, seed: int, num_rows: int, **shape: int) -> Kwargs:
        return {"pixels": noise(seed, num_rows, DEPTH), "rows": torch.tensor([num_rows])}


class TwoAxes(OnePath):
    """Pictures of two depths and two kinds: for each of the four its own graph. Kinds do nothing."""

    axes = ((DEPTH, 2 * DEPTH), ("day", "night"))

    def select_encoder_cudagraph_items(self, mm_kwargs: Kwargs, indices: list[int]) -> Kwargs:
        assert indices == list(range(len(mm_kwargs["rows"])))
        kind = ("day", "night")[int(mm_kwargs["night"][0])]
        return {**mm_kwargs, ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG: (mm_kwargs["pixels"].shape[1], kind)}

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, items: int, frames: int, device: Any, dtype: Any, path: str, axis_keys: Any
    ) -> EncoderCudaGraphCaptureInputs:
        return EncoderCudaGraphCaptureInputs({"pixels": torch.zeros(token_budget, axis_keys[0], dtype=dtype)})

    def item(self, seed: int, num_rows: int, depth: int = DEPTH, night: int = 0, **shape: int) -> Kwargs:
        pixels, rows = noise(seed, num_rows, depth), torch.tensor([num_rows])
        return {"pixels": pixels, "rows": rows, "night": torch.tensor([night])}


class TwoPaths(OnePath):
    """An item has rows of the whole picture and of its crops, or no crops: `crop_rows` [num_items].

    Its rows are put together after the replay, with `bias` [num_items], of which no graph knows.
    """

    paths: ClassVar = {
        "whole": EncoderCudaGraphPathConfig(),
        "crops": EncoderCudaGraphPathConfig(min_token_budget=4, allow_zero_tokens=True),
    }

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: Kwargs) -> list[EncoderItemSpec]:
        both = zip(mm_kwargs["rows"].tolist(), mm_kwargs["crop_rows"].tolist(), strict=True)
        return [EncoderItemSpec(rows, rows + crops, {"whole": rows, "crops": crops}) for rows, crops in both]

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: Kwargs, items: int, frames: int, path: str
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers({"pixels": mm_kwargs["pixels" if path == "whole" else "crops"]})

    def encoder_cudagraph_forward(self, inputs: Kwargs, path: str = "default") -> torch.Tensor:
        return encoded(inputs["pixels"], {"whole": 1, "crops": 2}[path])

    def postprocess_encoder_output(
        self,
        outputs: dict[str, torch.Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: Any,
        clone: bool = False,
        batch_mm_kwargs: Kwargs | None = None,
    ) -> None:
        assert batch_mm_kwargs is not None
        sizes = batch_mm_kwargs["rows"].tolist(), batch_mm_kwargs["crop_rows"].tolist()
        whole, crops = ends(sizes[0]), ends(sizes[1])
        for index in indices:
            parts = [outputs["whole"][slice(*whole[index])]]
            if sizes[1][index]:
                parts.append(outputs["crops"][slice(*crops[index])])
            dest[index] = torch.cat(parts) + batch_mm_kwargs["bias"][index]
            assert len(dest[index]) == per_item_out_tokens[index]

    def expected(self, item: Kwargs) -> torch.Tensor:
        return torch.cat([encoded(item["pixels"], 1), encoded(item["crops"], 2)]) + item["bias"]

    def item(self, seed: int, num_rows: int, crop_rows: int = 0, **shape: int) -> Kwargs:
        return {
            **super().item(seed, num_rows),
            "crops": noise(seed + 500, crop_rows, DEPTH),
            "crop_rows": torch.tensor([crop_rows]),
            "bias": torch.tensor([float(1 + seed % 7)]),
        }


class Views(OnePath):
    """Hands out parts of the graph's output itself, whatever `clone` says, as vLLM's Step3-VL does without patches."""

    def postprocess_encoder_output(
        self,
        outputs: dict[str, torch.Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: Any,
        clone: bool = False,
        batch_mm_kwargs: Kwargs | None = None,
    ) -> None:
        for index, (start, end) in enumerate(ends(per_item_out_tokens)):
            dest[index] = self.part(outputs["default"], start, end)

    def part(self, output: torch.Tensor, start: int, end: int) -> torch.Tensor:
        return output[start:end]


class Merged(Views):
    """Its graph gives two rows for each of the embedding, which are joined after the replay, as Ernie 4.5-VL's does."""

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, items: int, frames: int, device: Any, dtype: Any, path: str, axis_keys: Any
    ) -> EncoderCudaGraphCaptureInputs:
        return EncoderCudaGraphCaptureInputs({"pixels": torch.zeros(2 * token_budget, DEPTH, dtype=dtype)})

    def part(self, output: torch.Tensor, start: int, end: int) -> torch.Tensor:
        return output[2 * start : 2 * end].view(end - start, 2, WIDTH).sum(1)

    def expected(self, item: Kwargs) -> torch.Tensor:
        return encoded(item["pixels"], 1).view(-1, 2, WIDTH).sum(1)

    def item(self, seed: int, num_rows: int, **shape: int) -> Kwargs:
        return {"pixels": noise(seed, 2 * num_rows, DEPTH), "rows": torch.tensor([num_rows])}


def encoded(pixels: torch.Tensor, factor: int) -> torch.Tensor:
    """Exactly the same for a row wherever it stands: the numbers are small and whole."""
    depth = pixels.shape[1]
    weight = torch.arange(depth * WIDTH, dtype=pixels.dtype).view(depth, WIDTH) - 5
    return factor * (pixels @ weight) + 1


def noise(seed: int, num_rows: int, depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 50, (num_rows, depth), generator=generator).float()


def ends(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """First row of each, and the first behind it."""
    return [(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]


def joined(items: Sequence[Kwargs]) -> Kwargs:
    """The arguments for several items."""
    return {key: torch.cat([item[key] for item in items]) for key in items[0]}
