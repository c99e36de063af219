"""multiprocessing's fork server as a fork of this process: what was imported and made before is there once, for all.

The fork server that multiprocessing starts by itself imports everything again, which takes seconds and a second copy.
Such a one still comes where ours died. Memory is shared until somebody writes to it: the garbage collector must have
let go of what there is (`process_setup.freeze`), or it would write to every object.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import stat
import sys
import warnings
from collections.abc import Collection, Iterator
from multiprocessing import connection, forkserver, util
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_NAME = b"forkserver"
_UNKNOWN = (3, 14)
"""From this Python on, a fork server wants to be told a key."""


def start() -> None:
    """Forks this process once; the fork serves until this process ends. Does nothing where there is a fork server.

    For the main thread, before there is what a fork would break or must not have: a device's context, gRPC, threads of
    native code (`one_thread`), secrets, the pool. Of other Python threads the fork has none, and of open files only the
    standard ones. With a CUDA context there is no fork: multiprocessing's own fork server comes with the first process.

    Raises:
        OSError: there is no memory or process left.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None or sys.version_info >= _UNKNOWN:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        logger.warning("processes import vLLM for themselves: this one has a CUDA context already")
        return
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        if not util.is_abstract_socket_namespace(address):
            os.chmod(address, 0o600)
        listener.listen()
        alive_r, alive_w = os.pipe()
        try:
            pid = _fork(listener.fileno(), alive_r)
        except OSError:
            os.close(alive_w)
            raise
        finally:
            os.close(alive_r)
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_w
    server._forkserver_pid = pid


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keeps libraries from making threads meanwhile, for which a fork's calls would wait in vain."""
    import torch

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are for batches, and an item is a batch of one
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fork(listener_fd: int, alive_fd: int) -> int:
    """The fork's process id; in the fork, it does not return."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: see `start`
        pid = os.fork()
    if not pid:
        _serve(listener_fd, alive_fd, parent)
    return pid


def _serve(listener_fd: int, alive_fd: int, parent: int) -> NoReturn:
    """In the fork: as multiprocessing's own, until the other end of `alive_fd` is closed or `parent` dies."""
    status = 1
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, _NAME)
        _let_go_of_files({0, 1, 2, listener_fd, alive_fd})
        if os.getppid() == parent:
            forkserver.main(listener_fd, alive_fd, [])
    except SystemExit:
        status = 0
    except BaseException:  # whatever it is, it must not go on as its parent
        logger.exception("the fork server failed")
    finally:
        os._exit(status)


def _let_go_of_files(but: Collection[int]) -> None:
    """Puts nothing in place of all other open files, whose numbers objects may still hold, and close some day.

    Devices stay: a library that asks the driver which GPUs there are would go on with them.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd not in but and not _is_device(fd):
            os.dup2(nothing, fd, inheritable=False)


def _is_device(fd: int) -> bool:
    try:
        return stat.S_ISCHR(os.fstat(fd).st_mode)
    except OSError:  # the list's own, which is closed by now
        return True
