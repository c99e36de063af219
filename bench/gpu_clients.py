"""Client processes that load one server together, so that no client is what limits it. Linux only."""

import asyncio
import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

from typing_extensions import Self

from bench import ours, peer
from bench.load import Send, closed

CLIENTS: dict[str, Callable[[str], AbstractAsyncContextManager[Send[bytes]]]] = {
    "grpc": ours.client,
    "http": peer.client,
}
"""By what the server speaks, each for its address."""
MOST_S = 300.0
LEAVE_S = 5.0


class ClientsError(Exception):
    """A client failed or took too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What came of a load by all of them."""

    seconds: float
    """From the first request until the last answer and what it entailed."""
    latencies_s: tuple[float, ...]
    """Of each request, in ascending order."""
    client_cpu_s: float
    num_processes: int

    def percentile_s(self, percent: float) -> float:
        """The latency that so many requests of a hundred did not exceed."""
        return self.latencies_s[max(0, math.ceil(len(self.latencies_s) * percent / 100) - 1)]

    def figures(self) -> dict[str, float]:
        """As the record has it. `client_cores` near `client_processes` would say that the clients were the limit."""
        number = len(self.latencies_s)
        return {
            "requests": number,
            "seconds": self.seconds,
            "throughput": number / self.seconds,
            "p50_ms": self.percentile_s(50) * 1000,
            "p99_ms": self.percentile_s(99) * 1000,
            "client_processes": self.num_processes,
            "client_cores": self.client_cpu_s / self.seconds,
        }


class Clients:
    """So many processes, from entering until leaving; each holds requests of its own in flight."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(number):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            self._pipes.append(here)
            self._processes.append((process, there))

    def __enter__(self) -> Self:
        for process, there in self._processes:
            process.start()
            there.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(LEAVE_S if kind is None else 0.0)

    def end(self, within_s: float = 0.0) -> None:
        """Ends all of them, by force after so many seconds, whatever they are at. May be called again."""
        for pipe in self._pipes:
            pipe.close()
        for process, _ in self._processes:
            process.join(within_s)
            if process.is_alive():
                process.kill()
                process.join(LEAVE_S)

    def load(self, speaks: str, address: str, bodies: Sequence[bytes], warm: int, in_flight: int) -> Loaded:
        """Sends all `bodies`, each once, `in_flight` at a time over all processes; the first `warm` are not measured.

        Raises:
            ClientsError: a request failed, or it took more than `MOST_S`.
        """
        number = max(1, min(len(self._pipes), in_flight))
        pipes = self._pipes[:number]
        for index, pipe in enumerate(pipes):
            share = in_flight // number + (index < in_flight % number)
            pipe.send((speaks, address, bodies[:warm][index::number], bodies[warm:][index::number], share))
        deadline_s = time.monotonic() + MOST_S
        for pipe in pipes:  # all are warm
            _answer(pipe, deadline_s)
        for pipe in pipes:
            pipe.send("go")
        parts = [_answer(pipe, deadline_s) for pipe in pipes]
        return Loaded(
            seconds=max(ended for _, ended, _, _ in parts) - min(began for began, _, _, _ in parts),
            latencies_s=tuple(sorted(one for _, _, latencies, _ in parts for one in latencies)),
            client_cpu_s=sum(cpu for _, _, _, cpu in parts),
            num_processes=number,
        )


Part = tuple[float, float, tuple[float, ...], float]
"""When it began and ended, on the clock that all processes share; latencies; what it computed, in seconds."""


def _answer(pipe: Connection, deadline_s: float) -> Part:
    try:
        if not pipe.poll(max(0.0, deadline_s - time.monotonic())):
            raise ClientsError(f"clients were not done after {MOST_S:.0f} s")
        answer: Part | str = pipe.recv()
    except (EOFError, OSError):
        raise ClientsError("a client process ended") from None
    if isinstance(answer, str):
        raise ClientsError(answer)
    return answer


def _serve(pipe: Connection) -> None:
    """In a process: one load after the other, until the pipe's other end closes."""
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            speaks, address, warm, bodies, in_flight = pipe.recv()
            try:
                asyncio.run(_load(pipe, speaks, address, warm, bodies, in_flight))
            except Exception as error:  # whatever it is, the parent is to know
                pipe.send(f"{type(error).__name__}: {error}"[:800])


async def _load(
    pipe: Connection, speaks: str, address: str, warm: Sequence[bytes], bodies: Sequence[bytes], in_flight: int
) -> None:
    async with CLIENTS[speaks](address) as send:
        if warm:
            await closed(send, warm, in_flight)
        pipe.send((0.0, 0.0, (), 0.0))
        pipe.recv()
        began_s = time.perf_counter()
        result = await closed(send, bodies, in_flight)
        pipe.send((began_s, time.perf_counter(), result.latencies_s, result.client_cpu_s))
