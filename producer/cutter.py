"""Images → compact pixels (`pixels.py`), where the model's image processor is that of Qwen2-VL and does no more."""

import logging
from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalSharedField, PlaceholderRange

from producer.pixels import PIXELS, REPEATS, expand
from producer.stand_in import ProcessedItem, Processor

logger = logging.getLogger(__name__)

Grid = tuple[int, int]
"""Patches of an image in a column and in a row. All but its pixels follows from it."""
_GRID = "image_grid_thw"
_KNOWN = "transformers.models.qwen2_vl.image_processing_qwen2_vl.Qwen2VLImageProcessor"
_UNKNOWN = ("do_rescale", "do_normalize", "do_center_crop", "do_pad", "device", "input_data_format")
"""Settings under which pixels are no bytes of the resized image, or may be others."""


class Cutter:
    """Does what the model's image processor does up to its resize, with its own functions, and cuts patches.

    Not thread-safe.
    """

    def __init__(self, processor: Processor, images: Any, settings: Mapping[str, Any]) -> None:
        """
        Args:
            processor: vLLM's.
            images: the image processor in it.
            settings: what vLLM calls that with.
        """
        self._processor = processor
        self._images = images
        self._convert = settings["do_convert_rgb"]
        self._size, self._resample = settings["size"], settings["resample"]
        self._patch, self._merge = settings["patch_size"], settings["merge_size"]
        self._repeats = settings["temporal_patch_size"]

    def cut(self, media: Any) -> tuple[NDArray[np.uint8], Grid]:
        """Patches [number, 3, patch × patch] of a decoded image.

        Raises:
            ValueError: the model does not take this image.
        """
        image = getattr(media, "media", media)  # vLLM keeps a file's bytes beside its image
        whole = self._images.process_image(image, do_convert_rgb=self._convert)
        (resized,) = self._images.resize(
            images=whole.unsqueeze(0), size=self._size, resample=self._resample, factor=self._patch * self._merge
        )
        _, height, width = resized.shape
        patches = cut(resized.permute(1, 2, 0).numpy(), self._patch, self._merge)
        return patches, (height // self._patch, width // self._patch)

    def processed(self, grid: Grid, patches: NDArray[np.uint8] | None = None) -> ProcessedItem:
        """An image as vLLM's processor leaves one, but that its pixels are compact, and nothing is said of a prompt.

        Without `patches` there is room for them.
        """
        if patches is None:
            patches = np.empty((grid[0] * grid[1], 3, self._patch**2), np.uint8)
        fields = {PIXELS: torch.from_numpy(patches), _GRID: torch.tensor([[1, *grid]])}
        item = self._processor.item("image", fields)
        item[REPEATS] = MultiModalFieldElem(data=self._repeats, field=MultiModalSharedField(batch_size=1))
        rows = PlaceholderRange(offset=0, length=len(patches) // self._merge**2)
        return ProcessedItem(modality="image", media=None, kwargs=item, prompt=(), placeholder=rows, mm_hash="")


def cut(pixels: NDArray[np.uint8], patch: int, merge: int) -> NDArray[np.uint8]:
    """An image [height, width, channels] in patches [number, channels, patch × patch], `merge` × `merge` in a row."""
    height, width, channels = pixels.shape
    rows, columns = height // patch, width // patch
    runs = np.ascontiguousarray(pixels).reshape(height, columns, patch * channels)
    runs = runs.view(f"V{patch * channels}")  # so that a patch's part of a line is moved at once
    mixed = np.ascontiguousarray(
        runs.reshape(rows // merge, merge, patch, columns // merge, merge).transpose(0, 3, 1, 4, 2)
    )
    patches = np.empty((rows * columns, channels, patch * patch), np.uint8)
    by_channel = [patches[:, channel] for channel in range(channels)]
    cv2.split(mixed.view(np.uint8).reshape(rows * columns, patch * patch, channels), by_channel)
    return patches


def find_cutter(processor: Processor, *, hashes: bool = True) -> Cutter | None:
    """The model's cutter, which was seen to give what vLLM's processor gives; None where there is none.

    With `hashes` so was `Processor.mm_hash`.
    """
    try:
        images = getattr(processor.info.get_hf_processor(), "image_processor", None)
        if f"{type(images).__module__}.{type(images).__name__}" != _KNOWN:
            return None
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (75, 110, 3), np.uint8))
        wanted, settings = _watch(processor, images, image)
        if not settings.get("do_resize") or any(settings.get(name) for name in _UNKNOWN):
            return None
        cutter = Cutter(processor, images, settings)
        patches, grid = cutter.cut(image)
        has_hash = not hashes or processor.mm_hash("image", image) == wanted.mm_hash
        if has_hash and _same(cutter.processed(grid, patches), wanted):
            return cutter
        logger.warning("images are left to vLLM's processor: what is made of them here differs from what it makes")
    except Exception as error:  # a version of these libraries that is not known
        logger.warning("images are left to vLLM's processor: %s: %s", type(error).__name__, error)
    return None


def _watch(processor: Processor, images: Any, image: Image.Image) -> tuple[ProcessedItem, dict[str, Any]]:
    """What vLLM's processor makes of `image`, and the settings with which it calls the image processor in it."""
    settings: dict[str, Any] = {}
    work = images._preprocess

    def note(*args: Any, **kwargs: Any) -> Any:
        settings.update(kwargs)
        return work(*args, **kwargs)

    images._preprocess = note  # of this object, not of its class
    try:
        return processor.process("image", image), settings
    finally:
        del images._preprocess


def _same(compact: ProcessedItem, wanted: ProcessedItem) -> bool:
    found = expand({key: element.field.reduce_data([element]) for key, element in compact.kwargs.items()})
    expected = {key: element.field.reduce_data([element]) for key, element in wanted.kwargs.items()}
    return (
        compact.num_rows == wanted.num_rows
        and found.keys() == expected.keys()
        and all(found[key].dtype == expected[key].dtype and torch.equal(found[key], expected[key]) for key in found)
    )
