"""The slot ring: host memory that steps' inputs are written to, and that the device reads in place.

A slot owns its memory and its event, so that no slot is written while the device still reads it: entering one waits for
the event of its last use, leaving one records it behind the last kernel that reads it. Only the ring hands slots out.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from producer.runner.pinned import device_view

_ALIGNMENT = 256
"""Of a tensor within a slot, in bytes: what kernels with wide loads like."""


class Event(Protocol):
    """What a slot needs of `torch.cuda.Event`."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class _NoEvent:
    """On the host itself, a step has read its slot when it is left."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Slot:
    """The memory for all inputs of one step, as the host and as the device sees it. For one thread."""

    def __init__(self, num_bytes: int, device: torch.device, event: Event) -> None:
        """Takes `num_bytes` of host memory, pinned where `device` is another; `event` is the slot's own from here on.

        Raises:
            RuntimeError: the host has not so much, or it cannot be pinned.
        """
        self.event = event
        self._device = device
        self._allocate(num_bytes)

    @property
    def num_bytes(self) -> int:
        return int(self._host.numel())

    def clear(self, num_bytes: int) -> None:
        """Empties the slot for inputs of `num_bytes` in all, `size_of` each; grows it where that is more.

        Only for a slot that nothing reads any more, which is what `SlotRing.acquire` hands out.
        """
        if num_bytes > self.num_bytes:
            self._allocate(num_bytes)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for one more tensor: the same memory for the host to write to and for the device to read."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start, self._used = self._used, self._used + size_of(num_bytes)
        assert self._used <= self.num_bytes, (self._used, self.num_bytes)
        host, seen = (
            memory[start : start + num_bytes].view(dtype).view(tuple(shape)) for memory in (self._host, self._seen)
        )
        return host, seen

    def _allocate(self, num_bytes: int) -> None:
        self._host = self._seen = torch.empty(0, dtype=torch.uint8)  # what it had goes first
        self._host = torch.empty(size_of(num_bytes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._seen = device_view(self._host, self._device)
        self._used = 0


class SlotRing:
    """Owns the slots and hands them out in turn. For one thread."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        """A ring of `slots`, at least two, so that one can be written while the device reads another."""
        if len(slots) < 2:
            raise ValueError(f"a ring of {len(slots)} slots; at least 2 are needed")
        self._slots = list(slots)
        self._next = 0

    @classmethod
    def allocate(cls, num_slots: int, slot_bytes: int, device: torch.device) -> "SlotRing":
        """`num_slots` of `slot_bytes` each for `device`.

        Raises:
            RuntimeError: the host has not so much, or it cannot be pinned.
        """
        is_cuda = device.type == "cuda"
        return cls([Slot(slot_bytes, device, _blocking_event() if is_cuda else _NoEvent()) for _ in range(num_slots)])

    def __len__(self) -> int:
        return len(self._slots)

    @contextmanager
    def acquire(self, num_bytes: int) -> Iterator[Slot]:
        """The next slot, empty, with room for `num_bytes`, once the device has read what it last held.

        All that reads the slot is to be put on the current stream within the block, whether it fails or not.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.event.synchronize()
        slot.clear(num_bytes)
        try:
            yield slot
        finally:
            slot.event.record()


def size_of(num_bytes: int) -> int:
    """Bytes that a tensor of `num_bytes` takes of a slot."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _blocking_event() -> Event:
    event: Event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps: the cores are for preprocessing
    return event
