"""What a model prepares for a replay beside its items' pixels: remembered, since it depends on their sizes only.

Positions, windows and where sequences end take vLLM's code longer than all else on the host. What it gives for the same
small values and the same shapes is the same, as long as its code does not read the large tensors; so it is watched at
first, and nothing is remembered of a path on which it does.
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
    """Values for graphs' static inputs, by path. For one thread and one stream."""

    def __init__(self, prepare: Callable[[dict[str, Any], str], Values]) -> None:
        """`prepare` takes keyword arguments and a path."""
        self._prepare = prepare
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._num_bytes = 0
        self._num_watched: dict[str, int] = {}
        self._reading: set[str] = set()

    def get(self, kwargs: dict[str, Any], path: str) -> tuple[Values, Mapping[str, str], Hashable]:
        """The values; which of them come from which of `kwargs`; what all others follow from, None if not known."""
        key = None if path in self._reading else _key(kwargs, path)
        if key is None:
            return self._prepare(kwargs, path), {}, None
        entry = self._entries.get(key)
        if entry is None:
            entry = self._make(kwargs, path)
            if path in self._reading:
                return entry.values, {}, None
            self._keep(key, entry)
        self._entries.move_to_end(key)
        passed = {name: kwargs[source] for name, source in entry.passed.items()}
        return {**entry.values, **passed}, entry.passed, key

    def _make(self, kwargs: dict[str, Any], path: str) -> _Entry:
        num_watched = self._num_watched.get(path, 0)
        if num_watched < _TRUSTED:
            self._num_watched[path] = num_watched + 1
            with _Watch([leaf for leaf in tree_leaves(kwargs) if not _is_small(leaf)]) as watch:
                values = self._prepare(kwargs, path)
            if watch.has_read:
                self._reading.add(path)
        else:
            values = self._prepare(kwargs, path)
        sources = {id(value): name for name, value in kwargs.items()}
        passed = {name: sources[id(value)] for name, value in values.items() if id(value) in sources}
        kept = {name: value for name, value in values.items() if name not in passed}
        num_bytes = sum(value.nbytes for value in kept.values() if value is not None)
        return _Entry(values if path in self._reading else kept, passed, num_bytes)

    def _keep(self, key: Hashable, entry: _Entry) -> None:
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        while self._num_bytes > _MAX_BYTES and len(self._entries) > 1:
            self._num_bytes -= self._entries.popitem(last=False)[1].num_bytes


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


def _key(kwargs: Mapping[str, Any], path: str) -> Hashable:
    """All that values may follow from but for the contents of large tensors; None where it is not plain."""
    parts: list[Hashable] = [path]
    for name, value in sorted(kwargs.items()):
        if not isinstance(value, torch.Tensor):
            return None
        values = tuple(value.flatten().tolist()) if _is_small(value) else ()
        parts.append((name, value.device, value.dtype, value.shape, values))
    return tuple(parts)
