"""The shared region: one memory, several mappings."""

import multiprocessing
import os
from collections.abc import Iterator

import pytest

from producer.memory.region import SharedRegion

SIZE = 1 << 16


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with SharedRegion.create("ec-producer-test", SIZE) as region:
        yield region


def test_is_zeroed_and_as_large_as_asked(region: SharedRegion) -> None:
    assert region.num_bytes == region.view.nbytes == SIZE
    assert bytes(region.view) == bytes(SIZE)


def test_address_is_that_of_the_first_byte(region: SharedRegion) -> None:
    import ctypes

    region.view[:4] = b"here"
    assert ctypes.string_at(region.address, 4) == b"here"


def test_attaching_gives_the_same_memory_both_ways(region: SharedRegion) -> None:
    with SharedRegion.attach(os.getpid(), region.fd) as other:
        assert other.num_bytes == SIZE
        region.view[10:13] = b"one"
        assert bytes(other.view[10:13]) == b"one"
        other.view[10:13] = b"two"
    assert bytes(region.view[10:13]) == b"two"


def test_adopting_takes_the_descriptor_over(region: SharedRegion) -> None:
    fd = os.dup(region.fd)
    with SharedRegion.adopt(fd) as other:
        other.view[:3] = b"abc"
    assert bytes(region.view[:3]) == b"abc"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def _write_as_child(pid: int, fd: int) -> None:
    with SharedRegion.attach(pid, fd) as region:
        region.view[-5:] = b"child"


def test_another_process_attaches_through_proc(region: SharedRegion) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_write_as_child, args=(os.getpid(), region.fd))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert bytes(region.view[-5:]) == b"child"


def test_a_process_that_has_gone_is_an_os_error() -> None:
    gone = multiprocessing.get_context("spawn").Process(target=int)
    gone.start()
    gone.join()
    with pytest.raises(OSError, match="No such file"):
        SharedRegion.attach(gone.pid, 3)


def test_leaves_no_name_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    with SharedRegion.create("ec-producer-test", SIZE):
        assert set(os.listdir("/dev/shm")) == before


def test_more_than_the_host_can_map_is_an_os_error_and_leaks_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        SharedRegion.create("ec-producer-test", 1 << 62)
    assert set(os.listdir("/proc/self/fd")) == before


def test_closing_ends_the_view_and_the_descriptor() -> None:
    region = SharedRegion.create("ec-producer-test", SIZE)
    region.close()
    with pytest.raises(ValueError, match="released"):
        region.view[0]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(region.fd)


def test_closing_while_a_view_is_held_leaves_it_usable() -> None:
    region = SharedRegion.create("ec-producer-test", SIZE)
    part = region.view[:8]
    region.close()
    part[:] = b"in use!!"
    assert bytes(part) == b"in use!!"
    part.release()
    os.close(region.fd)


def test_closing_twice_is_harmless() -> None:
    region = SharedRegion.create("ec-producer-test", SIZE)
    region.close()
    region.close()
