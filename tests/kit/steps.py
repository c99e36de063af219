"""Stages for the tests of what stands around them: a step whose outcomes are there already, a coroutine for a pool."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from producer.core import MediaItem, PreparedItem
from producer.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Done:
    outcomes: Sequence[torch.Tensor | ServiceError]

    def finish(self) -> Sequence[torch.Tensor | ServiceError]:
        return self.outcomes


def on_this_loop(
    prepare: Callable[[str, MediaItem], Coroutine[Any, Any, PreparedItem]],
) -> "Callable[[str, MediaItem], Future[PreparedItem]]":
    """What begins `prepare` as the preprocessor begins its work, but for the thread: it all happens on the loop."""
    return lambda key, item: asyncio.run_coroutine_threadsafe(prepare(key, item), asyncio.get_running_loop())
