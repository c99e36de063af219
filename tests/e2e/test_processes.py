"""What a producer is made of ends with it, whichever way it ends; and what it needs is read, nothing else."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from consumer_shim.client import Producer, ProducerError
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.kit.photos import photos
from tests.kit.processes import Ending
from tests.kit.servers import ProducerServer

pytestmark = pytest.mark.e2e

END_WITHIN_S = 30.0
MIB = 1 << 20


def descendants(pid: int) -> set[int]:
    """Live processes that `pid` started, and those that they started."""
    found: set[int] = set()
    queue = [pid]
    while queue:
        tasks = Path(f"/proc/{queue.pop()}/task")
        children = {int(one) for task in tasks.glob("*/children") for one in task.read_text().split()}
        queue += children - found
        found |= children
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_status_0_and_all_its_processes(model: Path, number: signal.Signals) -> None:
    producer = ProducerServer(model, transports=("nixl",), name="e2e-signal")
    producer.start()
    producer.wait_ready()
    os.kill(producer.pid, number)
    assert producer.wait_ended(END_WITHIN_S)
    assert producer.stop() == Ending(code=0, killed=())


def test_sigkill_leaves_no_process(model: Path) -> None:
    producer = ProducerServer(model, transports=("nixl",), name="e2e-sigkill")
    producer.start()
    producer.wait_ready()
    (ticket,) = Producer(producer.address).encode(
        [pb.MediaItem(modality=pb.MODALITY_IMAGE, data=photos()["coffee.jpg"].data)], 60
    )
    assert not isinstance(ticket, ProducerError)
    parts = descendants(producer.pid)
    assert len(parts) >= 3, "fork server, a preprocessing process and NIXL's agent"
    producer.kill()
    deadline_s = time.monotonic() + END_WITHIN_S
    while any(map(is_alive, parts)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    left = [pid for pid in parts if is_alive(pid)]
    ending = producer.stop()
    assert not left
    assert ending is not None
    assert not ending.killed


def unique_bytes(pid: int) -> int:
    """Memory that no other process has mapped."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def test_what_is_imported_is_in_memory_once(model: Path) -> None:
    """A second import would take a process 190 MiB of its own, and a collector that looks through it each worker."""
    with ProducerServer(model, name="e2e-memory") as producer:
        parts = descendants(producer.pid)
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in parts}
        (server,) = (pid for pid, name in names.items() if name == "forkserver")
        workers = descendants(server)
        assert workers
        for pid in (server, *workers):
            assert unique_bytes(pid) < 90 * MIB, names[pid]
        assert sum(map(unique_bytes, (producer.pid, *parts))) < 400 * MIB


def test_language_model_weights_are_not_read(model: Path, tmp_path: Path) -> None:
    """The shard that holds them is no safetensors file at all; yet fingerprint and embedding are the same."""
    sharded = tmp_path / "model"
    shutil.copytree(model, sharded)
    tensors = load_file(model / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    tower = {name: tensor for name, tensor in tensors.items() if "visual" in name}
    save_file(tower, sharded / "tower.safetensors")
    (sharded / "language.safetensors").write_bytes(b"not weights")
    weight_map = {name: "tower.safetensors" if name in tower else "language.safetensors" for name in tensors}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    item = pb.MediaItem(modality=pb.MODALITY_IMAGE, data=photos()["coffee.jpg"].data)
    results = []
    for index, folder in enumerate((model, sharded)):
        with ProducerServer(folder, name=f"e2e-weights-{index}") as server:
            client = Producer(server.address)
            (ticket,) = client.encode([item], 60)
            assert not isinstance(ticket, ProducerError)
            results.append((client.info(10).fingerprint, ticket.key, client.fetch(ticket, 60)))
            client.close()
    assert results[0] == results[1]
