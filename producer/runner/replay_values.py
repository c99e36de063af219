"""What a model prepares for a replay beside its items' pixels: remembered, since it depends on their sizes only.

Positions, windows and where sequences end take vLLM's code longer than all else on the host. What it gives for the same
small values and the same shapes is the same, as long as its code does not read the large tensors; so it is watched at
first, and nothing is remembered where it does.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Values: TypeAlias = "Mapping[str, torch.Tensor | None]"
_FEW = 256
"""Elements on the host that are values, not pixels."""
_MAX_BYTES = 64 << 20
_TRUSTED = 16
"""As many layouts are watched."""


@dataclass(frozen=True, slots=True)
class _Entry:
    values: Values
    passed: Mapping[str, str]
    """Which values are the model's keyword arguments as they are, and which of them."""
    num_bytes: int


class ReplayValues:
    """Values for the static inputs of one path's graphs. For one thread and one stream."""

    def __init__(self, prepare: Callable[[dict[str, Any]], Values]) -> None:
        """`prepare` makes them of the model's keyword arguments."""
        self._prepare = prepare
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._num_watched = 0
        self._reads_pixels = False

    def get(self, kwargs: dict[str, Any]) -> tuple[Values, Mapping[str, str], Hashable]:
        """The values; which of them come from which of `kwargs`; what all others follow from, None if not known."""
        key = None if self._reads_pixels else _key(kwargs)
        entry = None if key is None else self._entries.get(key)
        if entry is None:
            values = self._prepare_watched(kwargs) if self._num_watched < _TRUSTED else self._prepare(kwargs)
            if key is None or self._reads_pixels:
                return values, {}, None
            entry = self._keep(key, kwargs, values)
        self._entries.move_to_end(key)
        passed = {name: kwargs[source] for name, source in entry.passed.items()}
        return {**entry.values, **passed}, entry.passed, key

    def _prepare_watched(self, kwargs: dict[str, Any]) -> Values:
        self._num_watched += 1
        with _Watch([leaf for leaf in tree_leaves(kwargs) if not _is_small(leaf)]) as watch:
            values = self._prepare(kwargs)
        self._reads_pixels |= watch.has_read
        return values

    def _keep(self, key: Hashable, kwargs: Mapping[str, Any], values: Values) -> _Entry:
        sources = {id(value): name for name, value in kwargs.items()}
        passed = {name: sources[id(value)] for name, value in values.items() if id(value) in sources}
        kept = {name: value for name, value in values.items() if name not in passed}
        entry = _Entry(kept, passed, sum(value.nbytes for value in kept.values() if value is not None))
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        while self._num_bytes > _MAX_BYTES and len(self._entries) > 1:
            self._num_bytes -= self._entries.popitem(last=False)[1].num_bytes
        return entry


class _Watch(TorchDispatchMode):
    """Sees whether an operator takes one of these tensors, or another on their memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._watched = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.has_read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self.has_read |= any(tensor.untyped_storage().data_ptr() in self._watched for tensor in tensors)
        return func(*args, **(kwargs or {}))


def _is_small(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or (leaf.device.type == "cpu" and leaf.numel() <= _FEW)


def _key(kwargs: Mapping[str, Any]) -> Hashable:
    """All that values may follow from but for the contents of large tensors; None where it is not plain."""
    parts: list[Hashable] = []
    for name, value in sorted(kwargs.items()):
        if not isinstance(value, torch.Tensor):
            return None
        values = tuple(value.flatten().tolist()) if _is_small(value) else ()
        parts.append((name, value.device, value.dtype, value.shape, values))
    return tuple(parts)
