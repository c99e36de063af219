"""What code does, counted instead of timed: operators of PyTorch, calls of Python functions, lines that are run.

Counts are the same on a busy machine and on an idle one, so that a test may bound them.
"""

import gc
import re
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ROOTS = (
    sysconfig.get_path("purelib") + "/",
    str(Path(__file__).parents[2]) + "/",
    sysconfig.get_path("stdlib") + "/",
)
_COPIES = {"_copy_from", "_to_copy", "cat", "clone", "concat", "constant_pad_nd", "copy", "copy_", "stack"}
_LOOKS = {"alias", "detach", "detach_", "lift_fresh"}
_BARE = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""They take memory and compute nothing."""
_BUILT_IN = {"aten", "prim", "prims"}
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@dataclass
class Operators:
    """Operators by name. One that is made of others counts as those: on a device, too, they are what is launched."""

    launches: "Counter[str]" = field(default_factory=Counter)
    """Those that compute or copy; on a GPU each is a kernel, or several."""
    copies: "Counter[str]" = field(default_factory=Counter)
    """Those of the launches that only move values."""
    allocations: "Counter[str]" = field(default_factory=Counter)
    """Tensors in memory that they took."""
    views: "Counter[str]" = field(default_factory=Counter)
    """Those that only look at the same memory in another way: time of the host, nothing on a device."""


def count_operators(run: Callable[[], object]) -> Operators:
    """What `run` has PyTorch do on this thread. What a kernel takes for itself while it runs is not seen."""
    counted = Operators()
    with _Dispatches(counted):
        run()
    return counted


class _Dispatches(TorchDispatchMode):
    def __init__(self, counted: Operators) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)  # as without a mode; its operators come here one by one
        if parts is not NotImplemented:
            return parts
        before = self._counted.launches.total()
        if func.namespace in _BUILT_IN:
            found = func(*args, **kwargs)
        else:
            with self:  # a model's own operator may be Python, which launches others
                found = func.redispatch(_CPU, *args, **kwargs)
        if self._counted.launches.total() == before:
            self._count(func, [args, kwargs], found)
        return found

    def _count(self, func: Any, given: Any, found: Any) -> None:
        name = func.overloadpacket.__name__
        known = {_memory(tensor) for tensor in _tensors(given)}
        new = {_memory(tensor) for tensor in _tensors(found)} - known
        counted = self._counted
        if new:
            counted.allocations[name] += len(new)
        if func.is_view or name in _LOOKS:
            counted.views[name] += 1
        elif name not in _BARE:
            counted.launches[name] += 1
            if name in _COPIES:
                counted.copies[name] += 1


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _tensors(one)


@dataclass
class Calls:
    """Calls of functions, those in C too, as "file:function": a C function counts where it is called."""

    by_function: "Counter[str]" = field(default_factory=Counter)

    @property
    def by_file(self) -> "Counter[str]":
        files: Counter[str] = Counter()
        for name, number in self.by_function.items():
            files[name.partition(":")[0]] += number
        return files

    def named(self, function: str) -> "Counter[str]":
        """Those of all functions and methods of that name, by function."""
        return Counter({name: n for name, n in self.by_function.items() if re.split("[.:]", name)[-1] == function})


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Counts the calls on this thread, and on those that are started within, until the block ends."""
    calls = Calls()
    seen: Counter[tuple[CodeType, str]] = Counter()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            seen[frame.f_code, ""] += 1
        elif event == "c_call":
            seen[frame.f_code, arg.__qualname__] += 1

    gc.collect()
    gc.disable()  # when it runs depends on what ran before
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
        for (code, name), number in seen.items():
            if code.co_filename != __file__:
                calls.by_function[f"{file_of(code)}:{name or code.co_qualname}"] += number


def count_lines(run: Callable[[], object], files: Iterable[str]) -> int:
    """Lines that `run` runs of code in `files` (ends of paths), on this thread: a loop counts as often as it turns."""
    wanted = tuple(files)
    number = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal number
        if not frame.f_code.co_filename.endswith(wanted):
            return None
        number += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return number


def file_of(code: CodeType) -> str:
    """Of the repository, an installed package or Python itself, the same on every machine."""
    for root in _ROOTS:
        if code.co_filename.startswith(root):
            return code.co_filename.removeprefix(root)
    return code.co_filename.rpartition("/")[2]
