"""The slot ring: whose turn it is, when a slot may be written again, and what lies in it. On the host."""

import pytest
import torch

from producer.runner.slot_ring import Slot, SlotRing, size_of

CPU = torch.device("cpu")
Log = list[tuple[str, int]]


class FakeEvent:
    """Writes down when it is recorded and waited for, and what its slot held then.

    Not reproduced: time. Nothing is ever late, and waiting returns at once.
    """

    def __init__(self, number: int, log: Log) -> None:
        self._number = number
        self._log = log
        self.slot: Slot
        self.seen_bytes: list[tuple[int, int]] = []

    def record(self) -> None:
        self._log.append(("record", self._number))

    def synchronize(self) -> None:
        self._log.append(("wait", self._number))
        self.seen_bytes.append((self.slot.num_bytes, self.slot._used))


def ring_of(count: int, num_bytes: int = 512) -> tuple[SlotRing, list[Slot], Log]:
    log: Log = []
    events = [FakeEvent(number, log) for number in range(count)]
    slots = [Slot(num_bytes, CPU, event) for event in events]
    for event, slot in zip(events, slots, strict=True):
        event.slot = slot
    return SlotRing(slots), slots, log


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_slots_are_handed_out_in_turn_each_between_its_wait_and_its_record(depth: int) -> None:
    ring, slots, log = ring_of(depth)
    assert len(ring) == depth
    for step in range(2 * depth + 1):
        with ring.acquire(1) as slot:
            assert slot is slots[step % depth]
            assert log == [("wait", step % depth)]
        assert log == [("wait", step % depth), ("record", step % depth)]
        log.clear()


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_slots_are_no_ring(count: int) -> None:
    with pytest.raises(ValueError, match=f"a ring of {count} slots; at least 2 are needed"):
        SlotRing.allocate(count, 512, CPU)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_leaves_the_slot_like_any_other_end(error: type[BaseException]) -> None:
    ring, slots, log = ring_of(2)
    with pytest.raises(error), ring.acquire(1):
        raise error
    assert log == [("wait", 0), ("record", 0)]
    with ring.acquire(1) as slot:
        assert slot is slots[1]


def test_an_event_that_fails_is_not_recorded_and_its_slot_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the device was lost: what may still be read is not written."""
    ring, slots, log = ring_of(2)

    def fail() -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(slots[0].event, "synchronize", fail)
    monkeypatch.setattr(slots[0], "clear", fail)
    with pytest.raises(RuntimeError, match="lost"), ring.acquire(1 << 20):
        raise AssertionError("unreachable")
    assert log == []


def test_a_slot_is_emptied_and_grows_only_after_the_wait() -> None:
    ring, slots, _ = ring_of(2)
    first, event = slots[0], slots[0].event
    assert isinstance(event, FakeEvent)
    for num_bytes in (512, 2048, 16):
        with ring.acquire(num_bytes) as slot:
            assert slot._used == 0
            slot.take((num_bytes,), torch.uint8)
        with ring.acquire(1):
            pass
    assert event.seen_bytes == [(512, 0), (512, 512), (2048, 2048)]
    assert (first.num_bytes, slots[1].num_bytes) == (2048, 512)  # only the one that had to, and it stays as large


def test_what_is_written_on_the_host_is_what_the_device_reads() -> None:
    ring, _, _ = ring_of(2)
    with ring.acquire(1024) as slot:
        host, seen = slot.take((2, 3), torch.float32)
        host.copy_(torch.arange(6).view(2, 3))
        assert seen.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (seen.dtype, seen.data_ptr()) == (torch.float32, host.data_ptr())


def test_tensors_lie_apart_and_aligned() -> None:
    ring, _, _ = ring_of(2, 4096)
    shapes = [((3,), torch.uint8), ((), torch.int64), ((5, 13), torch.bfloat16), ((0, 4), torch.float32)]
    with ring.acquire(4096) as slot:
        taken = [slot.take(shape, dtype)[0] for shape, dtype in shapes]
        base = slot._host.data_ptr()
        for value, tensor in enumerate(taken):
            tensor.fill_(value + 1)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in taken] == shapes
    assert [tensor.data_ptr() - base for tensor in taken[:3]] == [0, 256, 512]
    assert [tensor.unique().tolist() for tensor in taken] == [[1], [2], [3], []]


def test_more_than_was_asked_for_is_our_mistake() -> None:
    ring, _, _ = ring_of(2, 512)
    with ring.acquire(512) as slot:
        slot.take((257,), torch.uint8)
        with pytest.raises(AssertionError):
            slot.take((1,), torch.uint8)


@pytest.mark.parametrize(("num_bytes", "size"), [(0, 0), (1, 256), (256, 256), (257, 512)])
def test_sizes_are_whole_lines(num_bytes: int, size: int) -> None:
    assert size_of(num_bytes) == size
