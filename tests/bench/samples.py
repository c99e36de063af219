"""Measurements that nobody made."""

from bench.load import Result
from bench.measure import Sample
from bench.memory import Memory
from bench.report import Run
from bench.results import OURS, PEER
from bench.stages import InService


def sample(side: str, repeat: int, load: dict[str, float], *, rate: float, p50_ms: float = 10.0) -> Sample:
    """100 requests at `rate`; all of them took as long."""
    stages = {"preprocess": 0.3, "encode": 0.5, "publish": 0.01, "waiting": 2.0, "items": 100.0, "steps": 10.0}
    return Sample(
        side=side,
        repeat=repeat,
        load=load,
        result=Result(seconds=100 / rate, latencies_s=(p50_ms / 1000,) * 100, client_cpu_s=0.05),
        threads_cpu_s={"ec-producer serve 1, main thread": 0.4, "forkserver 2, main thread": 0.3},
        server_cpu_s=0.8,
        idle_cores=0.01,
        other_cores=0.25,
        stages=stages if side == OURS else {},
    )


def pairs(
    load: dict[str, float], *rates: tuple[float, float], p50_ms: tuple[float, float] = (4.0, 14.0)
) -> list[Sample]:
    """A repeat for each (ours, the peer's)."""
    return [
        sample(side, repeat, load, rate=both[index], p50_ms=p50_ms[index])
        for repeat, both in enumerate(rates)
        for index, side in enumerate((OURS, PEER))
    ]


def mib(number: int, shared: int) -> Memory:
    """A process, and its share of what others have mapped, too."""
    return Memory(unique_bytes=number << 20, proportional_bytes=(number + shared) << 20)


def run(*, ours_mib: int = 700) -> Run:
    """Three times the peer's throughput, 2/7 of its latency, and by default half its memory."""
    return Run(
        closed=[
            *pairs({"in_flight": 1}, (240, 68), (250, 70), (245, 69)),
            *pairs({"in_flight": 32}, (440, 150), (450, 150), (480, 150)),
        ],
        opened=pairs({"rate": 75.0}, (75, 74)),
        memory={
            OURS: {"ec-producer serve 1": mib(ours_mib, 200)},
            PEER: {"vllm serve 3": mib(900, 50), "worker 4": mib(500, 50)},
        },
        ready_after_s={OURS: 9.0, PEER: 17.0},
        stage_rows=[],
        service={
            name: InService(ms_per_item=2.0, share_of_core=0.5, items_per_call=10.0)
            for name in ("preprocess", "encode", "publish", "waiting")
        },
    )
