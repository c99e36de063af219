"""Checks of what the kernel gives: memory, processors, limits, shared memory."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from producer.config import ServeConfig
from producer.doctor.finding import Deployment, Finding, fine, size, warning, wrong
from producer.doctor.probe import ProbeError
from producer.memory.region import SharedRegion

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_SHM = Path("/dev/shm")
_LITTLE_SHM_BYTES = 64 << 20
"""What a container gets by default. UCX, which NIXL uses, and PyTorch put queues there."""
_ENCODER_BYTES = 4 << 30
"""What the service takes beside pool and preprocessing: libraries, and on the CPU the encoder."""
_MARK = b"ec-producer"
_FILES = (512, 16)
"""Open files: of the service with its clients, and for each preprocessing process."""
_TASKS = (256, 16)
"""Threads and processes, in the same way."""


def check_shared_memory(deployment: Deployment) -> list[Finding]:
    """The pool is anonymous memory that other processes reach through /proc."""
    try:
        with SharedRegion.create("ec-producer-doctor", 1 << 16) as region:
            region.view[: len(_MARK)] = _MARK
            reached = deployment.prober.ask("region", os.getpid(), region.fd, timeout_s=30.0)
    except OSError as error:
        return wrong(f"anonymous shared memory cannot be had: {error.strerror}", "allow memfd_create and mmap")
    except ProbeError as error:
        do = "allow processes of one user to read each other's /proc; until then consumers use another transport"
        return warning(f"another process does not reach it through /proc: {error}", do)
    if not reached:
        return warning("another process finds other memory at its place in /proc", "look at what mounts /proc")
    return fine("anonymous memory can be had, and other processes of this user reach it")


def check_dev_shm(deployment: Deployment) -> list[Finding]:
    try:
        found = os.statvfs(_SHM)
    except OSError as error:
        return warning(f"{_SHM}: {error.strerror}", "mount a tmpfs there")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    what = f"{_SHM} has {size(total)}, {size(free)} free; the pool is not in it"
    if free < _LITTLE_SHM_BYTES:
        return warning(what, "mount an emptyDir of medium Memory there, or --shm-size 1g; NIXL and PyTorch use it")
    return fine(what)


def check_hugepages(deployment: Deployment) -> list[Finding]:
    info = _meminfo()
    total, free, page = (info.get(name, 0) for name in ("HugePages_Total", "HugePages_Free", "Hugepagesize"))
    if not total:
        return fine("none reserved, and none needed: the pool takes ordinary pages")
    return fine(
        f"{free} of {total} pages of {size(page << 10)} are free; the pool takes ordinary pages and none of them"
    )


def check_memory(deployment: Deployment) -> list[Finding]:
    config = deployment.config
    most, whose = _memory_limit()
    workers = config.preprocess_workers * config.preprocess_memory_bytes
    what = f"{whose} is {size(most)}; the pool may take {size(config.pool_bytes)}"
    if config.pool_bytes > most:
        return wrong(f"{what}, so the process would be killed while it fills", f"--pool-bytes below {size(most)}")
    wanted = config.pool_bytes + workers + _ENCODER_BYTES
    what += (
        f", {config.preprocess_workers} processes {size(config.preprocess_memory_bytes)} each at worst,"
        f" the rest about {size(_ENCODER_BYTES)}"
    )
    if wanted > most:
        do = f"allow {size(wanted)}, or lower --preprocess-workers, --preprocess-memory-bytes or --pool-bytes"
        return warning(what, do)
    return fine(what)


def check_processors(deployment: Deployment) -> list[Finding]:
    usable, workers = _processors(), deployment.config.preprocess_workers
    what = f"{usable:g} processors may be used, by {workers} preprocessing processes and the service"
    if workers > max(1.0, usable):
        return warning(what, f"--preprocess-workers {max(1, int(usable))}: more of them only wait for each other")
    return fine(what)


def check_files(deployment: Deployment) -> list[Finding]:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = _needed(_FILES, deployment.config)
    if _is_below(most, needed):
        return warning(f"{most} files may be open; about {needed} are needed", "ulimit -n 65536, or LimitNOFILE=65536")
    return fine(f"{_shown(most)} files may be open; about {needed} are needed")


def check_tasks(deployment: Deployment) -> list[Finding]:
    own = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [own] if own >= 0 and os.geteuid() else []  # root is not held to it
    limits += [int(text) for text in _cgroup_values("pids", "pids.max") if text.isdigit()]
    needed = _needed(_TASKS, deployment.config)
    what = f"{min(limits, default='any number of')} threads and processes may run; about {needed} are needed"
    if limits and min(limits) < needed:
        return warning(what, "raise ulimit -u and the pod's limit of process ids, or lower --preprocess-workers")
    return fine(what)


def check_locked_memory(deployment: Deployment) -> list[Finding]:
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return fine(f"{size(most) if most >= 0 else 'any amount'} may be locked, which only RDMA needs; see rdma")


def _memory_limit() -> tuple[int, str]:
    """Bytes that this process may take, and whose limit that is."""
    limits = [(_meminfo().get("MemTotal", 0) << 10, "this host's memory")]
    for name in ("memory.max", "memory.limit_in_bytes"):
        limits += [(int(text), "the cgroup's memory") for text in _cgroup_values("memory", name) if text.isdigit()]
    return min(limits)


def _processors() -> float:
    usable = float(len(os.sched_getaffinity(0)))
    for text in _cgroup_values("cpu", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            usable = min(usable, int(quota) / int(period))
    return usable


def _cgroup_values(controller: str, file: str) -> Iterator[str]:
    """What `file` says in this process's cgroup and in those above it, in version 2 or in `controller` of version 1."""
    try:
        lines = [line.split(":", 2) for line in _OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controllers if controllers else _CGROUP
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):
            if not folder.is_relative_to(root):
                break
            try:
                yield (folder / file).read_text().strip()
            except OSError:
                continue


def _meminfo() -> dict[str, int]:
    """Of /proc/meminfo: pages, or KiB."""
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}


def _needed(each: tuple[int, int], config: ServeConfig) -> int:
    return each[0] + each[1] * config.preprocess_workers + 2 * config.max_streams


def _is_below(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def _shown(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)
