"""The parts `service` and `start`: the producer and the peer's servers under the same loads, and their start."""

import base64
import contextlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench import ours, peer
from bench.gpu_clients import Clients, ClientsError
from bench.gpu_record import Record
from bench.gpu_servers import Place, shown, start_all, weights_s
from bench.gpu_steps import REFERENCE
from bench.gpu_targets import OURS, PEER
from bench.gpu_timing import SEED, relative_error
from bench.images import picture
from bench.measure import COUNTS
from bench.memory import cpu_seconds, parent, tree
from consumer_shim.client import Producer, ProducerError
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.kit.processes import Service
from tests.kit.samples import scraped
from tests.kit.servers import ProducerServer, ScrapedService, VllmServer
from tests.kit.stack import Stack

LOAD_SEED = 20261130
PROCESSES = 4
CALL_S, FILE_S = 60.0, 5.0
CHECKS, CHECK_SIDE = 3, 448
MAX_DISTANCE = 0.03
"""Between ours and the peer's: each is 1.8 % from float32 in bfloat16, so that wholly different roundings are 2.5 %."""
MAX_ERROR_RATIO = 1.02
"""Of ours over the peer's, where there is a float32 reference."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EXTRA = {
    "graph_hits": "ec_producer_graph_hits_total",
    "graph_misses": "ec_producer_graph_misses_total",
    "shared": "ec_producer_items_shared_total",
}

Loads = Sequence[tuple[int, int, int, int]]
"""Side of the pictures, how many of them are measured, before that, and how many are in flight."""
LOADS: Loads = ((448, 960, 64, 32), (1036, 192, 32, 32), (448, 60, 8, 1))
REHEARSED: Loads = ((112, 16, 8, 8), (224, 8, 4, 8), (112, 8, 2, 1))


def load_name(side: int, in_flight: int) -> str:
    return f"{side}x{in_flight}"


def measure_service(record: Record, place: Place, work: Path, saved: Path, peers: Sequence[str], loads: Loads) -> None:
    """All servers start at the same time; then one after the other is loaded, ours first, and checked.

    Of the peers, `peer` must work; another that does not is recorded as such.
    """
    pictures = pictures_of(loads)
    with Stack() as stack, contextlib.ExitStack() as processes:
        clients = processes.enter_context(Clients(PROCESSES))
        servers: dict[str, ScrapedService] = {OURS: place.ours()}
        servers |= {name: place.peer(name, _folder(saved, name)) for name in peers}
        for name in peers:
            record.put(f"service/{name}/flags", shown(place.flags_of(name)))
        record.put(f"service/{OURS}/flags", shown(place.our_flags))
        ready = start_all(stack, place, servers)
        for name, server in servers.items():
            try:
                _measure_one(record, name, server, ready[name], saved, loads, pictures, clients)
            except (ClientsError, OSError, ValueError) as error:
                clients.end()  # they may be in the midst of it
                clients = processes.enter_context(Clients(PROCESSES))
                record.put(f"service/{name}/failed", str(error)[-2500:])
                if name in (OURS, PEER):
                    record.add("failures", f"service {name}: {str(error)[-2500:]}")
        if all(isinstance(ready.get(name), float) for name in (OURS, PEER)):
            _check(record, servers, _folder(saved, PEER), work / "steps" / REFERENCE)


def _measure_one(
    record: Record,
    name: str,
    server: ScrapedService,
    ready: float | str,
    saved: Path,
    loads: Loads,
    pictures: Sequence[Sequence[bytes]],
    clients: Clients,
) -> None:
    """
    Raises:
        ValueError: it did not become ready.
        ClientsError: a request failed.
    """
    if isinstance(ready, str):
        raise ValueError(f"it was not ready: {ready}")
    record.put(f"service/{name}/ready_s", ready)
    speaks, address, request = way_to(server)
    for (side, _, warm, in_flight), images in zip(loads, pictures, strict=True):
        requests = [request(image) for image in images]
        before, cpu_s = counts(server), cpu_seconds(tree(parent(server.pid)))
        found = clients.load(speaks, address, requests, warm, in_flight)
        cpu_s = cpu_seconds(tree(parent(server.pid))) - cpu_s
        figures = found.figures() | {"server_cpu_ms": cpu_s / len(requests) * 1000}
        record.put(f"service/{name}/{load_name(side, in_flight)}", figures | stages(before, counts(server)))
        _empty(_folder(saved, name))


def way_to(server: ScrapedService) -> tuple[str, str, Any]:
    """What it speaks, where, and what makes a request of a picture."""
    if isinstance(server, ProducerServer):
        return "grpc", server.address, ours.request
    assert isinstance(server, VllmServer)
    return "http", server.url, peer.request


def pictures_of(loads: Loads, first: int = 0) -> list[list[bytes]]:
    """Those of each load, all different, and of no load that has another number, counted from `first`.

    They are made by some processes, since that takes as long as to encode them.
    """
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        found = [
            pool.map(_picture, ((side, index * 100_000 + one) for one in range(warm + number)), chunksize=16)
            for index, (side, number, warm, _) in enumerate(loads, first)
        ]
        return [[*pictures] for pictures in found]


def _picture(which: tuple[int, int]) -> bytes:
    side, number = which
    return picture(LOAD_SEED, number, side)


def counts(server: ScrapedService) -> dict[str, float]:
    """What the producer's own metrics count; nothing of another server."""
    if not isinstance(server, ProducerServer):
        return {}
    text = server.scrape()
    found = {name: scraped(text, metric, **labels) for name, (metric, labels) in COUNTS.items()}
    return found | {name: scraped(text, metric) for name, metric in EXTRA.items()}


def stages(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """The stage table: milliseconds of an item in each, items in a step; warm-up is in it. Empty without counts."""
    grown = {name: after[name] - before[name] for name in after}
    items, steps = grown.pop("items", 0.0), grown.pop("steps", 0.0)
    if not items:
        return {}
    extra = {name: int(grown.pop(name)) for name in EXTRA}
    table = {f"{name}_ms_per_item": seconds / items * 1000 for name, seconds in grown.items()}
    return {"stages": table | {"items_per_step": items / steps, "step_ms": grown["encode"] / steps * 1000} | extra}


def _check(record: Record, servers: Mapping[str, Service], saved: Path, reference: Path) -> None:
    """Compares embeddings of ours and the peer's with each other, and with float32 where `step` left a reference."""
    producer, vllm = servers[OURS], servers[PEER]
    assert isinstance(producer, ProducerServer)
    assert isinstance(vllm, VllmServer)
    found = torch.load(reference) if reference.exists() else {}
    own, others = [], []
    for index in range(CHECKS):
        image = picture(SEED, index, CHECK_SIDE)
        own.append(pulled(producer.address, image))
        others.append(saved_by(vllm, image, saved))
    figures = {
        "pictures": CHECKS,
        "shape": list(own[0].shape),
        "distance": distance(own, others),
        "error": relative_error(own, CHECK_SIDE, found),
        "error_of_peer": relative_error(others, CHECK_SIDE, found),
    }
    record.put("service/check", figures)
    for failure in wrong_embeddings(figures):
        record.add("failures", failure)


def wrong_embeddings(figures: Mapping[str, Any]) -> list[str]:
    """What is wrong with the figures of `service/check`: a line each."""
    failures = []
    if not figures["distance"] <= MAX_DISTANCE:  # NaN is not
        failures.append(f"service: ours and the peer's are {figures['distance']:.4f} apart; allowed is {MAX_DISTANCE}")
    error, other = figures["error"], figures["error_of_peer"]
    if error is not None and other is not None and not error <= MAX_ERROR_RATIO * other:
        failures.append(
            f"service: the error is {error:.5f}, the peer's {other:.5f}; allowed is {MAX_ERROR_RATIO:g} times that"
        )
    return failures


def distance(own: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Root of squared differences over squared values; infinite where shapes differ."""
    if [one.shape for one in own] != [one.shape for one in others]:
        return float("inf")
    return relative_error(own, 0, {(0, index): one.float() for index, one in enumerate(others)}) or 0.0


def pulled(address: str, image: bytes) -> torch.Tensor:
    """The embedding of a picture, [rows, width], by Encode, Acquire and Fetch.

    Raises:
        ValueError: the producer refuses.
    """
    client = Producer(address)
    try:
        (outcome,) = client.encode([pb.MediaItem(modality=pb.MODALITY_IMAGE, data=image)], CALL_S)
        if isinstance(outcome, ProducerError):
            raise ValueError(f"the producer refuses: {outcome}")
        rows = bytearray(client.fetch(outcome, CALL_S))
        return torch.frombuffer(rows, dtype=DTYPES[outcome.dtype]).reshape(outcome.num_rows, outcome.width)
    finally:
        client.close()


def saved_by(server: VllmServer, image: bytes, folder: Path) -> torch.Tensor:
    """The embedding of a picture, [rows, width], that the peer leaves in its empty folder.

    Raises:
        ValueError: it leaves none or several, or the request failed.
    """
    import httpx

    _empty(folder)
    body = json.loads(peer.request(image))
    (url,) = [part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url"]
    assert base64.b64decode(url.rpartition(",")[2]) == image
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=CALL_S, trust_env=False)
    if answer.status_code != httpx.codes.OK:
        raise ValueError(f"vLLM answers {answer.status_code}: {answer.text[:500]}")
    deadline_s = time.monotonic() + FILE_S
    while not (files := [*folder.glob("*/encoder_cache.safetensors")]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    if len(files) != 1:
        raise ValueError(f"the peer left {len(files)} embeddings of one picture; expected is 1")
    tensor: torch.Tensor = load_file(files[0])["ec_cache"]
    return tensor


def _folder(saved: Path, name: str) -> Path:
    folder = saved / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _empty(folder: Path) -> None:
    """What a load left would fill the memory."""
    for one in folder.iterdir():
        shutil.rmtree(one, ignore_errors=True)


def measure_start(record: Record, place: Place, saved: Path, peers: Sequence[str] = (PEER,)) -> None:
    """From the start of the process until it is ready, each alone, when its files were read before."""
    for name in (OURS, *peers):
        while place.num_started.get(name, 0) < 1:
            _start_once(place, name, saved)
        ready_s, log = _start_once(place, name, saved)
        weights = weights_s(log)
        record.put(
            f"start/{name}",
            {
                "ready_s": ready_s,
                "weights_s": weights,
                "ready_without_weights_s": None if weights is None else ready_s - weights,
            },
        )
        if weights is None:
            record.add("failures", f"start {name}: its log does not say what loading the weights took")


def _start_once(place: Place, name: str, saved: Path) -> tuple[float, Path]:
    """
    Raises:
        ValueError: it was not ready in time.
    """
    server = place.ours() if name == OURS else place.peer(name, _folder(saved, name))
    with Stack() as stack:
        ready = start_all(stack, place, {name: server})[name]
    if isinstance(ready, str):
        raise ValueError(f"start {name}: {ready}")
    return ready, server.log
