"""Preprocessed items → the model's keyword arguments, by way of a slot: each tensor is copied once, into its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.multimodal.inputs import (
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    nested_tensors_equal,
)
from vllm.utils.jsontree import json_iter_leaves, json_map_leaves

from producer.pixels import REPEATS, expand
from producer.runner.slot_ring import Slot, size_of


@dataclass(frozen=True, slots=True)
class _Joint:
    """A tensor that is yet to be written: `parts` one behind the other along their first dimension."""

    parts: list[torch.Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(map(len, self.parts)), *self.parts[0].shape[1:]) if self.parts[0].ndim else ()

    @property
    def num_bytes(self) -> int:
        return size_of(sum(part.nbytes for part in self.parts))

    def write(self, slot: Slot) -> torch.Tensor:
        host, seen = slot.take(self.shape, self.parts[0].dtype)
        if host.ndim:
            torch.cat(self.parts, out=host)
        else:
            host.copy_(self.parts[0])
        return seen


class StepInputs:
    """The inputs of items that go into one call, still where preprocessing left them."""

    def __init__(self, items: Sequence[MultiModalKwargsItem]) -> None:
        """`items` can all be joined."""
        self._trees = {key: _plan([item[key] for item in items]) for key in items[0]}

    @property
    def num_bytes(self) -> int:
        """What they take of a slot."""
        return sum(leaf.num_bytes for leaf in json_iter_leaves(self._trees) if isinstance(leaf, _Joint))

    def write(self, slot: Slot, *, takes_compact: bool = False) -> dict[str, Any]:
        """The model's keyword arguments: views of the slot, and on the host what the model wants there.

        Pixels that came compact are not in the slot, but beside it on the device, unless the model takes them so.
        """
        return expand(
            {
                key: json_map_leaves(lambda leaf: leaf.write(slot) if isinstance(leaf, _Joint) else leaf, tree)
                for key, tree in self._trees.items()
            },
            takes_compact=takes_compact,
        )


def on_host(item: MultiModalKwargsItem) -> dict[str, Any]:
    """The model's keyword arguments for one item, where preprocessing left them; its pixels may be compact."""
    return {key: element.field.reduce_data([element]) for key, element in item.items() if key != REPEATS}


def can_join(left: MultiModalKwargsItem, right: MultiModalKwargsItem) -> bool:
    """Whether the model takes both in one call: they have the same fields, and the same in those that are shared."""
    return left.keys() == right.keys() and all(
        type(one.field) is type(right[key].field)
        and (
            not isinstance(one.field, MultiModalSharedField)
            or nested_tensors_equal(one.data, right[key].data, check_dtype=True)
        )
        for key, one in left.items()
    )


def _plan(elements: list[MultiModalFieldElem]) -> Any:
    """What vLLM makes of one field of several items, with `_Joint`s for the tensors that go to the device."""
    field = elements[0].field
    if field.keep_on_cpu:
        return field.reduce_data(elements)
    if not isinstance(field, MultiModalSharedField) and getattr(field, "dim", 0) == 0:
        parts = [element.field.reduce_data([element]) for element in elements]
        if all(isinstance(part, torch.Tensor) and part.ndim and _row(part) == _row(parts[0]) for part in parts):
            return _Joint(parts)
    whole = field.reduce_data(elements)
    return json_map_leaves(lambda leaf: _Joint([leaf]) if isinstance(leaf, torch.Tensor) else leaf, whole)


def _row(tensor: torch.Tensor) -> Any:
    return tensor.shape[1:], tensor.dtype
