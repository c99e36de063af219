"""From ready to the end of the process: watched while it serves, drained when it is told to stop."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import grpc

from producer.admission import Admission
from producer.embedding_pool import EmbeddingPool
from producer.health import Health
from producer.preprocess import Preprocessor
from producer.step_loop import StepLoop
from producer.transport.base import Outlet

logger = logging.getLogger(__name__)

_SWEEP_S = 1.0
_STEP_TIMEOUT_S = 10.0
_DRAIN_POLL_S = 0.05


def probes(
    loop: StepLoop, preprocessor: Preprocessor, outlets: Mapping[str, Outlet], *, stall_s: float
) -> dict[str, Callable[[], str]]:
    """For `Health`: what is wrong with each part; "" where it works."""
    found: dict[str, Callable[[], str]] = {
        "device": lambda: loop.lost or _stall(loop.stalled_s, stall_s),
        "preprocessing": lambda: preprocessor.down_reason() or "",
    }
    for name, outlet in outlets.items():
        found[f"transport {name}"] = functools.partial(_down, outlet)
    return found


async def watch(
    stop: asyncio.Event, health: Health, loop: StepLoop, sweeps: Sequence[Callable[[], object]], *, stall_exit_s: float
) -> None:
    """Until `stop`: says how the parts are, and ends what is over although nobody asks. It exits where all is lost.

    One of `sweeps` that returns True has more to end, and is called again after others had their turn.
    """
    while not stop.is_set():
        await health.check()
        if loop.lost or loop.stalled_s > stall_exit_s:
            exit_at_once(1, f"only a restart helps: {loop.lost or 'the step in hand is stuck'}")
        for sweep in sweeps:
            while sweep():  # noqa: ASYNC110  # it is not waited for: it works
                await asyncio.sleep(0)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), _SWEEP_S)
    await health.stop()


async def drain(admission: Admission, pool: EmbeddingPool, server: grpc.aio.Server, drain_s: float) -> None:
    """Work in hand is finished, and leases are honoured, until the deadline; what is left then is refused."""
    logger.info("stopping; work in hand and %d leases have %.0f s", pool.num_leases, drain_s)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_finish(admission, pool), drain_s)
    await server.stop(grace=1.0)


def stop_steps(loop: StepLoop) -> None:
    """Ends the device thread, or the process with it."""
    if not loop.stop(_STEP_TIMEOUT_S):
        exit_at_once(1, "the step in hand does not end")


def stop_signal() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process. Installed after loading, which any ends."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_first() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, lambda number, _: exit_at_once(128 + number, "a second signal came"))
        stop.set()

    for number in signals:
        loop.add_signal_handler(number, on_first)
    return stop


def exit_at_once(status: int, why: str) -> NoReturn:
    """Ends the process without its destructors, which may wait for what never comes. Children end with their parent."""
    logger.critical("exiting: %s", why)
    logging.shutdown()
    os._exit(status)


async def _finish(admission: Admission, pool: EmbeddingPool) -> None:
    await admission.drain()
    while pool.num_leases:
        await asyncio.sleep(_DRAIN_POLL_S)
        pool.expire()


def _stall(seconds: float, most_s: float) -> str:
    return f"the step in hand has made no progress for {seconds:.0f} s" if seconds > most_s else ""


def _down(outlet: Outlet) -> str:
    return "" if outlet.is_up else "it is down; it is being started again"
