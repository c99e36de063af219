"""The targets by name, and what each may take of a machine."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.checks import within
from tests.fuzz.mutate import Mutate


@dataclass(frozen=True, slots=True)
class Target:
    """A target's bounds; `load` imports it."""

    name: str
    instrumented: tuple[str, ...] = ("producer", "consumer_shim")
    """Top-level packages whose coverage guides."""
    max_bytes: int = 4096
    cpu_s: int = 5
    """Seconds that the process may spend on one input; more is a finding."""
    wait_s: int = 60
    """Seconds for one input by the clock, for what hangs outside of Python or waits; more is a finding."""
    memory_mb: int = 1024
    """Memory of the process; more is a finding."""

    def load(self) -> tuple[Callable[[bytes], None], Mutate]:
        """The target, set up and with its bound of time, and its mutation."""
        module: Any = importlib.import_module(f"tests.fuzz.targets.{self.name}")
        module.target(b"")

        def run(data: bytes) -> None:
            with within(self.cpu_s):
                module.target(data)

        return run, module.mutate

    def seeds(self) -> dict[str, bytes]:
        """Small valid inputs by name."""
        seeds: dict[str, bytes] = importlib.import_module(f"tests.fuzz.targets.{self.name}").seeds()
        return seeds


TARGETS = {
    target.name: target
    for target in (
        Target("api"),
        Target("block"),
        Target("chat"),
        Target("answers"),
        Target("side_channel"),
        Target("transports"),
        Target("settings"),
        Target("media", ("producer", "PIL"), cpu_s=10, memory_mb=4096),
    )
}
