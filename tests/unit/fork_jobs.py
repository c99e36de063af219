"""A process with a fork server of its own, which tests tell what to do: `python -m tests.unit.fork_jobs`.

It reads a line of JSON with a list, `[name, argument, …]`, and writes one with the answer.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from producer import fork_server, process_setup
from producer.worker_main import Message
from producer.worker_pool import WorkerPool

WAIT_S = 60.0
KEPT = {"state": "as imported"}


def make() -> Callable[[Message], Message]:
    return _tell


def _tell(request: Message) -> Message:
    """What a worker has of the process that it is a fork of."""
    files = {name: _target(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    command = Path("/proc/self/cmdline").read_text()
    return Message(
        fields={
            "pid": os.getpid(),
            "state": KEPT["state"],
            "files": files,
            "command": command,
            "threads": threading.active_count(),
        }
    )


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # the list's own
        return os.devnull


class Owner:
    """The process: what it has open must not be in its forks."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.pipe = os.pipe()
        self.thread = threading.Thread(target=threading.Event().wait, daemon=True)
        self.thread.start()
        self.pool = WorkerPool(1, make, timeout_s=WAIT_S, memory_bytes=1 << 28)

    def start(self) -> int:
        """Forks, having changed what is imported."""
        KEPT["state"] = "as changed"
        process_setup.freeze()
        fork_server.start()
        return self.server()

    def server(self) -> int:
        pid: Any = forkserver._forkserver
        return int(pid._forkserver_pid)

    def ask(self) -> dict[str, Any]:
        """What a worker tells."""
        answer: Message = self.pool.submit(Message()).result(WAIT_S)
        return answer.fields

    def port(self) -> int:
        return int(self.listener.getsockname()[1])


def main() -> None:
    owner = Owner()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(owner, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
