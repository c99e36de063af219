"""What a step's inputs become in a slot: what vLLM itself makes of the same items, each tensor in its place."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from producer.core import MediaItem
from producer.runner.slot_ring import Slot, size_of
from tests.unit.models import decoded_item, model_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # torch's, of received bytes
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
]

PICTURES = [(84, 112), (224, 140), (300, 500)]
Sized = tuple[int, ...]


@pytest.fixture(scope="module")
def worker() -> Callable[[str], Any]:
    """By family; made when it is first asked for."""

    @functools.cache
    def make(family: str) -> Any:
        from producer.media_limits import MediaLimits
        from producer.preprocess_worker import _Worker
        from producer.stand_in import choose_forms

        config = model_config(family)
        return _Worker(config, choose_forms(config, ("image", "video"))[0], MediaLimits())

    return make


def noise(modality: str, size: Sized) -> MediaItem:
    pixels = np.random.default_rng(sum(size)).integers(0, 256, (*size, 3), dtype=np.uint8)
    return decoded_item(modality, pixels, 2.0 if modality == "video" else 0.0)


@pytest.fixture(scope="module")
def item(worker: Callable[[str], Any]) -> Callable[[str, str, Sized], Any]:
    """A family's input items of noise, of a modality and a size in pixels, as preprocessing sends them."""

    def make(family: str, modality: str, size: Sized) -> Any:
        from vllm.multimodal.inputs import MultiModalKwargsItem
        from vllm.v1.serial_utils import MsgpackDecoder

        from producer.preprocess_worker import prepared, request

        inputs = prepared(worker(family).answer(request(noise(modality, size)))).inputs
        return MsgpackDecoder(MultiModalKwargsItem).decode(inputs)

    return make


@pytest.fixture(scope="module")
def processed(worker: Callable[[str], Any]) -> Callable[[str, str, Sized], Any]:
    """The same as vLLM's processor leaves them."""

    def make(family: str, modality: str, size: Sized) -> Any:
        one = worker(family)
        return one._processor.process(modality, one._decoder.decode(noise(modality, size))).kwargs

    return make


@pytest.fixture
def slot() -> Slot:
    class Event:
        """Of a slot that no device reads."""

        def record(self) -> None: ...
        def synchronize(self) -> None: ...

    return Slot(256, torch.device("cpu"), Event())


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    from vllm.utils.jsontree import json_iter_leaves

    return (leaf for leaf in json_iter_leaves(tree) if isinstance(leaf, torch.Tensor))


def written(slot: Slot, items: Sequence[Any]) -> dict[str, Any]:
    from producer.runner.inputs import StepInputs

    inputs = StepInputs(items)
    slot.clear(inputs.num_bytes)
    found = inputs.write(slot)
    assert slot._used == inputs.num_bytes  # what was asked for is what was taken
    return found


def of_vllm(items: Sequence[Any]) -> dict[str, Any]:
    from vllm.multimodal.utils import group_and_batch_mm_items

    ((count, kwargs),) = group_and_batch_mm_items(items)
    assert count == len(items)
    return dict(kwargs)


@pytest.mark.parametrize(
    ("family", "modality", "sizes"),
    [
        ("qwen2_5_vl", "image", PICTURES),
        ("qwen2_5_vl", "video", [(4, 84, 112), (8, 56, 140)]),
        ("qwen3_vl", "video", [(4, 128, 128), (6, 96, 160)]),
        ("gemma3", "image", PICTURES),
        ("internvl", "image", PICTURES),
        ("minicpm_v4_6", "image", PICTURES),
        ("minicpm_v4_6", "image", PICTURES[:1] * 2),
        ("idefics3", "image", PICTURES),
        ("qwen2_vl", "image", PICTURES),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_the_models_arguments_are_vllms_own(
    item: Callable[..., Any],
    processed: Callable[..., Any],
    slot: Slot,
    family: str,
    modality: str,
    sizes: list[Sized],
) -> None:
    from vllm.multimodal.inputs import nested_tensors_equal

    from producer.runner.inputs import can_join

    items = [item(family, modality, size) for size in sizes]
    assert all(can_join(items[0], other) for other in items)
    for number in (1, len(items)):
        found = written(slot, items[:number])
        wanted = of_vllm([processed(family, modality, size) for size in sizes[:number]])
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert nested_tensors_equal(found[key], wanted[key], check_dtype=True), key


@pytest.mark.parametrize("family", ["gemma3", "internvl", "minicpm_v4_6"])
def test_what_the_device_reads_lies_in_the_slot_and_nothing_else_does(
    item: Callable[..., Any], slot: Slot, family: str
) -> None:
    items = [item(family, "image", size) for size in PICTURES]
    on_host = {key for key, element in items[0].items() if element.field.keep_on_cpu}
    found = written(slot, items)
    start = slot._host.data_ptr()
    for key, tree in found.items():
        for leaf in leaves(tree):
            offset = leaf.data_ptr() - start
            inside = offset >= 0 and offset + leaf.nbytes <= slot.num_bytes
            assert inside == (key not in on_host), key


def test_compact_pixels_take_their_bytes_of_the_slot_and_are_repeated_beside_it(
    item: Callable[..., Any], slot: Slot
) -> None:
    items = [item("qwen2_5_vl", "image", size) for size in PICTURES]
    pixels = written(slot, items)["pixel_values"]
    sent = torch.cat([one["pixel_values"].data for one in items])
    assert slot._used == size_of(sent.nbytes) < pixels.nbytes
    before = pixels.clone()
    slot._host.zero_()  # as the next step may once this one's kernels have read it
    assert torch.equal(pixels, before)
    assert torch.equal(pixels.view(len(sent), 3, 2, -1), sent.unsqueeze(2).expand(-1, -1, 2, -1))


def test_what_a_graph_needs_is_found_on_compact_pixels_without_their_mark(item: Callable[..., Any]) -> None:
    from producer.runner.inputs import on_host

    found = on_host(item("qwen2_5_vl", "image", (84, 112)))
    assert set(found) == {"pixel_values", "image_grid_thw"}
    assert len(found["pixel_values"]) == 6 * 8 == found["image_grid_thw"].prod()


def test_a_step_that_is_written_leaves_its_items_as_they_were(item: Callable[..., Any], slot: Slot) -> None:
    items = [item("qwen2_5_vl", "image", size) for size in PICTURES]
    before = [tensor.clone() for one in items for tensor in leaves(dict(one.get_data()))]
    found = written(slot, items)
    for leaf in leaves(found):
        if leaf.is_floating_point() or leaf.dtype == torch.uint8:
            leaf.zero_()
    after = [tensor for one in items for tensor in leaves(dict(one.get_data()))]
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))


# What can share a step


def fields(**elements: Any) -> Any:
    from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

    return MultiModalKwargsItem(
        {key: MultiModalFieldElem(data=data, field=field) for key, (data, field) in elements.items()}
    )


def batched(data: Any, **settings: Any) -> Any:
    from vllm.multimodal.inputs import MultiModalBatchedField

    return data, MultiModalBatchedField(**settings)


def flat(data: Any, dim: int = 0) -> Any:
    from vllm.multimodal.inputs import MultiModalFlatField

    return data, MultiModalFlatField(slices=[(slice(None),) * dim + (slice(0, 1),)], dim=dim)


def shared(data: Any) -> Any:
    from vllm.multimodal.inputs import MultiModalSharedField

    return data, MultiModalSharedField(batch_size=1)


def test_items_of_other_fields_do_not_join() -> None:
    from producer.runner.inputs import can_join

    ones, twos = torch.ones(2), torch.full((2,), 2.0)
    plain = fields(pixels=batched(ones))
    assert can_join(plain, fields(pixels=batched(twos)))
    assert not can_join(plain, fields(embeds=batched(ones)))
    assert not can_join(plain, fields(pixels=batched(ones), grid=batched(ones)))
    assert not can_join(plain, fields(pixels=flat(ones)))


def test_items_join_whose_shared_fields_are_equal() -> None:
    from producer.runner.inputs import can_join

    def one(value: float, dtype: torch.dtype = torch.float32) -> Any:
        return fields(pixels=batched(torch.rand(3)), rate=shared(torch.tensor(value, dtype=dtype)))

    assert can_join(one(2), one(2))
    assert not can_join(one(2), one(3))
    assert not can_join(one(2), one(2, torch.float64))


RAGGED = [torch.arange(4.0).view(2, 2), torch.arange(6.0).view(2, 3)]


@pytest.mark.parametrize(
    "make",
    [
        lambda number: {"values": batched(RAGGED[number])},  # no stack: a list
        lambda number: {"values": flat(RAGGED[number].T.contiguous()[:, :2])},
        lambda number: {"values": flat(RAGGED[number], dim=1)},  # joined along another dimension
        lambda number: {"values": flat(RAGGED[0] + number, dim=1)},
        lambda number: {"values": flat(RAGGED[number], dim=0)},  # other rows: a list
        lambda number: {"values": batched(torch.tensor(number))},
        lambda number: {"values": batched(torch.tensor([number, 7]), keep_on_cpu=True)},
        lambda number: {"values": shared(torch.tensor([1.5, 2.5]))},
        lambda number: {"values": batched([RAGGED[0], RAGGED[number]])},
        lambda number: {"values": batched(torch.zeros(0, 4, dtype=torch.bfloat16))},
        lambda number: {"values": batched(number)},
    ],
    ids=[
        "ragged",
        "flat",
        "flat by columns",
        "flat by columns alike",
        "flat ragged",
        "scalar",
        "on host",
        "shared",
        "nested",
        "empty",
        "number",
    ],
)
def test_every_kind_of_field_is_joined_as_vllm_does(slot: Slot, make: Callable[[int], dict[str, Any]]) -> None:
    from vllm.multimodal.inputs import nested_tensors_equal

    items = [fields(**make(number)) for number in range(2)]
    for some in (items[:1], items):
        found, wanted = written(slot, some)["values"], of_vllm(some)["values"]
        assert nested_tensors_equal(found, wanted, check_dtype=True), (found, wanted)
        assert type(found) is type(wanted)
