"""Shared memory between two processes: the other one holds a region and prints where it is."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from producer.memory.region import SharedRegion
from producer.transport.base import BlockDescriptor, TransportError
from producer.transport.shm import ShmOutlet, ShmReader

BYTES = 1 << 20
OWNER = f"""
import sys
from producer.memory.region import SharedRegion
from producer.transport.shm import ShmOutlet
region = SharedRegion.create("owner", {BYTES})
region.view[:] = bytes(range(256)) * ({BYTES} // 256)
print(ShmOutlet(region).describe().peer, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=-1, stdout=-1, text=True) as process:
        yield process


@pytest.fixture
def place(owner: "subprocess.Popen[str]") -> str:
    assert owner.stdout is not None
    return owner.stdout.readline().strip()


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    with SharedRegion.create("landing", BYTES) as region:
        yield region


def block(place: str, address: int, num_bytes: int) -> BlockDescriptor:
    return BlockDescriptor(
        transport="shm",
        lease_id="",
        address=address,
        num_bytes=num_bytes,
        generation=1,
        peer=place,
        peer_metadata=b"",
    )


@pytest.mark.parametrize(("address", "num_bytes"), [(0, 1), (4096, 5000), (0, BYTES), (BYTES - 1, 1)])
def test_a_block_is_copied_and_nothing_else(region: SharedRegion, place: str, address: int, num_bytes: int) -> None:
    reader = ShmReader(region)
    reader.read(block(place, address, num_bytes), 0, 1.0)
    assert bytes(region.view[:num_bytes]) == (bytes(range(256)) * (BYTES // 256))[address : address + num_bytes]
    assert not any(region.view[num_bytes:])
    assert reader.is_settled(0)
    reader.close()


@pytest.mark.parametrize(("address", "num_bytes"), [(BYTES, 1), (BYTES - 10, 11), (1 << 60, 8)])
def test_a_block_outside_of_the_region_is_an_error(
    region: SharedRegion, place: str, address: int, num_bytes: int
) -> None:
    with pytest.raises(TransportError, match="outside of the producer's region"):
        ShmReader(region).read(block(place, address, num_bytes), 0, 1.0)
    assert not any(region.view)


def test_a_region_is_reached_while_its_owner_lives(
    region: SharedRegion, owner: "subprocess.Popen[str]", place: str
) -> None:
    assert ShmReader(region).reaches(place)
    owner.kill()
    owner.wait()
    reader = ShmReader(region)
    assert not reader.reaches(place)
    with pytest.raises(TransportError, match="not to be had here"):
        reader.read(block(place, 0, 1), 0, 1.0)


def test_what_a_dead_owner_left_is_unmapped_at_the_next_mapping(
    region: SharedRegion, owner: "subprocess.Popen[str]", place: str
) -> None:
    reader = ShmReader(region)
    reader.read(block(place, 0, 1), 0, 1.0)
    assert "/memfd:owner" in maps()
    owner.kill()
    owner.wait()
    assert reader.reaches(ShmOutlet(region).place)
    assert "/memfd:owner" not in maps()


@pytest.mark.parametrize("change", ["neighbours", "inode", "form", "number"])
def test_another_place_is_not_reached(region: SharedRegion, place: str, change: str) -> None:
    """Another host, PID namespace or user; a descriptor that is another file by now; no place at all."""
    neighbours, pid, fd, inode = place.split(" ")
    changed = {
        "neighbours": f"{neighbours}0 {pid} {fd} {inode}",
        "inode": f"{neighbours} {pid} {fd} {int(inode) + 1}",
        "form": f"{neighbours} {pid} {fd}",
        "number": f"{neighbours} {pid} x {inode}",
    }[change]
    assert not ShmReader(region).reaches(changed)
    assert not ShmReader(region).reaches("")


def maps() -> str:
    with open(f"/proc/{os.getpid()}/maps") as file:
        return file.read()
