"""The static inputs that a path's graphs read: shared by all of them, and filled before each replay.

Each graph's tensors are views of the largest's. After a step of one layout, a step of the same brings but its pixels.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import torch

from producer.runner.replay_values import ReplayValues, Values

Inputs: TypeAlias = "dict[str, torch.Tensor]"


class StaticInputs:
    """Owns the buffers of one path. For one thread and one stream."""

    def __init__(
        self, prepare: Callable[[dict[str, Any]], Values], padding: Mapping[str, Callable[[torch.Tensor, Any], None]]
    ) -> None:
        """`prepare` makes the values of the model's keyword arguments; `padding` writes those that end in no zeros."""
        self._values = ReplayValues(prepare)
        self._padding = padding
        self._buffers: Inputs = {}
        self._filled: tuple[int, Hashable] = (0, None)

    def share(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """`value` as a view of the buffer of that name, whose first and largest user's tensor it is."""
        whole = self._buffers.setdefault(name, value)
        if (
            value.ndim == 0
            or whole.shape[1:] != value.shape[1:]
            or whole.dtype != value.dtype
            or len(whole) < len(value)
        ):
            return value
        view = whole[: len(value)]
        if view.data_ptr() != value.data_ptr():
            view.copy_(value)
        return view

    def fill(self, inputs: Inputs, num_rows: int, kwargs: dict[str, Any]) -> bool:
        """Fills the graph's `inputs` with what its `num_rows` are made of; False, with nothing done, if it has no room.

        `kwargs`, the model's, are read by what is put on the current stream.
        """
        values, passed, key = self._values.get(kwargs)
        if not _holds(inputs, values):
            return False
        was_filled, self._filled = self._filled, (0, None)
        for name in passed if key is not None and was_filled == (num_rows, key) else inputs:
            self._fill(name, inputs[name], values.get(name))
        self._filled = num_rows, key
        return True

    def _fill(self, name: str, static: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is None:
            return
        if static.ndim == 0:
            static.copy_(value, non_blocking=True)
        elif pad := self._padding.get(name):
            pad(static, value)
        else:
            static[: len(value)].copy_(value, non_blocking=True)
            static[len(value) :].zero_()


def _holds(inputs: Inputs, values: Values) -> bool:
    """Whether every value has room in the static input of its name."""
    for name, static in inputs.items():
        value = values.get(name)
        if value is not None and static.ndim and (len(value) > len(static) or value.shape[1:] != static.shape[1:]):
            return False
    return True
