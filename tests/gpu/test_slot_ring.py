"""The hazard that the ring is there for: a slot that is written while the device has yet to read it."""

from typing import Any

import pytest
import torch

from producer.runner.slot_ring import Slot, SlotRing
from tests.gpu.report import report

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEPTHS = (2, 3, 4)
STEPS = 40
SLOT_BYTES = 1 << 20
DELAY_CYCLES = 20_000_000
"""About 10 ms: far more than it takes the host to write a slot."""


class NoEvent:
    """What the ring must not have: an event that nobody waits for."""

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return


def corrupted_steps(depth: int, make_event: Any) -> int:
    """How many of the steps read something else than was written for them, where the device is late with each."""
    device = torch.device("cuda:0")
    ring = SlotRing([Slot(SLOT_BYTES, device, make_event()) for _ in range(depth)])
    found = torch.zeros(STEPS, SLOT_BYTES, dtype=torch.uint8, device=device)
    for step in range(STEPS):
        with ring.acquire(SLOT_BYTES) as slot:
            host, seen = slot.take((SLOT_BYTES,), torch.uint8)
            host.fill_(step + 1)
            torch.cuda._sleep(DELAY_CYCLES)
            found[step].copy_(seen, non_blocking=True)
    torch.cuda.synchronize()
    expected = torch.arange(1, STEPS + 1, dtype=torch.uint8, device=device).unsqueeze(1)
    return int((found != expected).any(dim=1).sum())


def test_a_late_read_is_corrupted_without_the_event_and_never_with_it() -> None:
    without = {depth: corrupted_steps(depth, NoEvent) for depth in DEPTHS}
    guarded = {depth: corrupted_steps(depth, lambda: torch.cuda.Event(blocking=True)) for depth in DEPTHS}
    report(
        "hazard",
        {
            "depths": list(DEPTHS),
            "steps": STEPS * len(DEPTHS),
            "corrupted_without_event": sum(without.values()),
            "corrupted": sum(guarded.values()),
            "by_depth": {depth: {"without_event": without[depth], "with_event": guarded[depth]} for depth in DEPTHS},
        },
    )
    assert all(without.values())
    assert not any(guarded.values())


def test_a_slot_grows_only_after_its_readers_are_done() -> None:
    device = torch.device("cuda:0")
    ring = SlotRing.allocate(2, 1 << 12, device)
    results = []
    for step, num_bytes in enumerate([1 << 12, 1 << 12, 1 << 20, 1 << 21, 1 << 22, 1 << 22], start=1):
        with ring.acquire(num_bytes) as slot:
            host, seen = slot.take((num_bytes,), torch.uint8)
            host.fill_(step)
            torch.cuda._sleep(DELAY_CYCLES)
            results.append(seen.clone())
    torch.cuda.synchronize()
    assert [(int(one.min()), int(one.max())) for one in results] == [(step, step) for step in range(1, 7)]


def test_leaving_by_an_error_records_the_event_too() -> None:
    device = torch.device("cuda:0")
    ring = SlotRing.allocate(2, 1 << 20, device)
    results = []

    def fail_late(step: int) -> None:
        with ring.acquire(1 << 20) as slot:
            host, seen = slot.take((1 << 20,), torch.uint8)
            host.fill_(step)
            torch.cuda._sleep(DELAY_CYCLES)
            results.append(seen.clone())
            raise ZeroDivisionError

    for step in range(1, 9):
        with pytest.raises(ZeroDivisionError):
            fail_late(step)
    torch.cuda.synchronize()
    assert [(int(one.min()), int(one.max())) for one in results] == [(step, step) for step in range(1, 9)]


def test_waiting_for_a_slot_does_not_spin() -> None:
    """A waiting thread sleeps: it takes far less of a core than the time it waits."""
    import time

    ring = SlotRing.allocate(2, 1 << 12, torch.device("cuda:0"))
    torch.cuda.synchronize()
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    for _ in range(6):
        with ring.acquire(1 << 12):
            torch.cuda._sleep(200_000_000)
    torch.cuda.Event(blocking=True).synchronize()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
    assert wall_s > 0.2
    assert cpu_s < wall_s / 4, (cpu_s, wall_s)
