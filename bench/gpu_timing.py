"""Pictures, errors and times of encoder steps, alike for all variants of `bench.gpu_step`."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from bench.images import picture

SEED = 448
REPLAYS, WARM = 20, 5
REPEATS = 3
MEASURED_MS = 400.0
Reference = Mapping[tuple[int, int], torch.Tensor]
"""By side and number of the picture, its embedding in float32."""


def name_of(side: int, number: int) -> str:
    """Of a case, as figures have it."""
    return f"{number}x{side}"


def jpegs(side: int, number: int) -> list[bytes]:
    """The pictures of a case, and of the reference."""
    return [picture(SEED, index, side) for index in range(number)]


def relative_error(embeddings: Sequence[torch.Tensor], side: int, reference: Reference) -> float | None:
    """Of those of which there is a reference, together: root of squared differences over squared references."""
    pairs = [
        (one.double().cpu(), reference[side, index].double())
        for index, one in enumerate(embeddings)
        if (side, index) in reference
    ]
    if not pairs:
        return None
    return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs) / sum(float((b**2).sum()) for _, b in pairs))


def are_all_finite(embeddings: Sequence[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(one).all()) for one in embeddings)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_ms(call: Callable[[], object]) -> float:
    """Time on the device of one of several calls in a row; the median of some repeats. Without one, on the host."""
    number = times_for(_span_ms(call, WARM))
    return statistics.median(_span_ms(call, number) for _ in range(REPEATS))


def times_for(ms: float) -> int:
    """How often to do what takes so long: as often as `REPLAYS`, and for `MEASURED_MS` about."""
    return max(WARM, min(REPLAYS, int(MEASURED_MS / max(ms, 0.001))))


def _span_ms(call: Callable[[], object], number: int) -> float:
    synchronize()
    if not torch.cuda.is_available():
        since_s = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - since_s) / number * 1000
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(number):
        call()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / number


def wall_ms(call: Callable[[], object]) -> float:
    """Time until one call and what it put on the device are done, one after the other; the median."""

    def once() -> float:
        since_s = time.perf_counter()
        call()
        synchronize()
        return (time.perf_counter() - since_s) * 1000

    return statistics.median(once() for _ in range(times_for(once())))
