"""What is asked in a process of its own: `python -m producer.doctor.probes FD [NAME, ARGUMENT, ...]` writes JSON to FD.

A probe may import what hangs, crashes or prints; whoever asks has a deadline.
"""

import ctypes
import importlib
import json
import os
import sys
from typing import Any

from producer.errors import first_sentence
from producer.memory.region import SharedRegion

_MARK = b"ec-producer"


def driver() -> dict[str, Any]:
    """The NVIDIA driver's own view: CUDA version and devices; `missing` or `error` where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"missing": str(error)}
    if code := cuda.cuInit(0):
        return {"error": code}
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(256)
        cuda.cuDeviceGetName(name, len(name), index)
        names.append(name.value.decode("utf-8", "replace"))
    return {"cuda": f"{version.value // 1000}.{version.value % 1000 // 10}", "devices": names}


def torch() -> dict[str, Any]:
    """PyTorch, what it was built for, and the first device as it sees it."""
    torch: Any = importlib.import_module("torch")
    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda or ""}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        found |= {"device": torch.cuda.get_device_name(0), "free_bytes": free, "total_bytes": total}
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    return found


def vllm() -> dict[str, Any]:
    """vLLM and the platform that it chose."""
    vllm: Any = importlib.import_module("vllm")
    platform = importlib.import_module("vllm.platforms").current_platform
    return {"version": vllm.__version__, "platform": str(platform.device_type)}


def modules(names: list[str]) -> dict[str, str]:
    """Those that cannot be imported, and why."""
    found = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a library may raise anything here
            found[name] = f"{type(error).__name__}: {error}"
    return found


def transport(name: str, options: dict[str, str]) -> str:
    """Opens it over a small region, as `serve` does."""
    from producer.transport.registry import open_outlet

    with SharedRegion.create("ec-producer-doctor", 1 << 20) as region:
        outlet = open_outlet(name, region, options)
        peer = outlet.describe().peer
        outlet.close()
    return peer


def region(pid: int, fd: int) -> bool:
    """Whether the region of another process is reached from here, with what was written there."""
    with SharedRegion.attach(pid, fd) as found:
        return bytes(found.view[: len(_MARK)]) == _MARK


def model(settings: dict[str, Any]) -> dict[str, Any]:
    """Has vLLM read the model's configuration and try how its media can be stood for; loads no weights."""
    from producer.decode import MODALITIES
    from producer.runner.encoder import VllmEncoder

    encoder = VllmEncoder(modalities=MODALITIES, **settings)
    return {"modalities": sorted(encoder.forms), "dtype": encoder.dtype}


_PROBES = {probe.__name__: probe for probe in (driver, torch, vllm, modules, transport, region, model)}


def main() -> None:
    writing = int(sys.argv[1])
    os.set_inheritable(writing, False)
    name, *arguments = json.loads(sys.argv[2])
    try:
        answer = {"value": _PROBES[name](*arguments)}
    except Exception as error:  # whatever it is, it is the answer
        answer = {"error": first_sentence(error)}
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)  # libraries that hang or crash at their end have answered


if __name__ == "__main__":
    main()
