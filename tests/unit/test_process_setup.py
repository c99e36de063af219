"""How a serving process is set: in processes of their own, since it lasts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

SCRIPT = """
import gc, json, os, sys, threading, tempfile, ctypes
from producer import process_setup

def arenas():
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile() as file:
        stream = libc.fdopen(os.dup(file.fileno()), b"w")
        libc.malloc_info(0, ctypes.c_void_p(stream))
        libc.fclose(ctypes.c_void_p(stream))
        file.seek(0)
        return file.read().count(b"<heap nr")

told = {}
if sys.argv[1] == "set":
    process_setup.before_imports()
told["collects while it imports"] = gc.isenabled()
told["switches after s"] = sys.getswitchinterval()
try:
    import rfc3987_syntax
except ImportError:
    told["rfc3987_syntax"] = "left out"
ready = threading.Barrier(8)
threads = [threading.Thread(target=lambda: (bytearray(100_000), ready.wait())) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
told["arenas"] = arenas()
if sys.argv[1] == "set":
    process_setup.freeze()
told["collects"] = gc.isenabled()
told["frozen"] = gc.get_freeze_count()
print(json.dumps(told))
"""


def told(how: str) -> dict[str, Any]:
    command = [sys.executable, "-c", SCRIPT, how]
    found: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    return found


def test_what_is_imported_stays_and_is_not_looked_through() -> None:
    found = told("set")
    assert not found["collects while it imports"]
    assert found["collects"]
    assert found["frozen"] > 1000
    assert found["rfc3987_syntax"] == "left out"


def test_threads_share_two_arenas() -> None:
    assert told("not")["arenas"] > 2, "glibc has no need of it any more"
    assert told("set")["arenas"] <= 2


def test_threads_take_turns_sooner_than_python_has_it() -> None:
    assert told("set")["switches after s"] < told("not")["switches after s"] / 5
