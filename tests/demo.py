"""`make demo`: the same questions about the same photographs, to plain vLLM and through ec-producer.

    python -m tests.demo

Five servers run side by side on loopback ports: plain vLLM with its own image encoder;
one `ec-producer serve`; and LLM-only vLLMs that pull each embedding from it, one over
gRPC, one over NIXL, and one that gets noise in its place. Ends with `DEMO OK` and 0, or
with a line for each failure, `DEMO FAILED` and 1.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.kit.chat import Answer, ChatError, ask, chat_request
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.leftovers import leftovers, snapshot
from tests.kit.photos import Photo, photos
from tests.kit.processes import LOGS_DIR, Ending, ServiceError
from tests.kit.servers import NOISE_CONNECTOR, SHIM_CONNECTOR, ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

ROOT = Path(__file__).parents[1]
FAMILY = "qwen2_5_vl"
COUNT_TIMEOUT_S = 10.0  # a pull is counted when its lease is released, which may follow the answer
TRANSPORTS = ("grpc", "nixl")
INTERRUPTED = 130

started_s = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    title: str
    pictures: tuple[str, ...]
    text: str
    stream: bool = False

    def parts(self) -> list[Photo | str]:
        return [*(photos()[name] for name in self.pictures), self.text]


QUESTIONS = (
    Question(title="one image, JPEG", pictures=("coffee.jpg",), text="What is this?"),
    Question(title="one image, PNG", pictures=("chelsea.png",), text="Who is this?"),
    Question(title="two images", pictures=("astronaut.jpg", "rocket.png"), text="What have they in common?"),
    Question(
        title="two images, streamed",
        pictures=("hubble_deep_field.jpg", "motorcycle_left.png"),
        text="Which is further away?",
        stream=True,
    ),
)
NUM_PICTURES = sum(len(question.pictures) for question in QUESTIONS)


@dataclass(slots=True, kw_only=True)
class Run:
    """One vLLM, and what it answered."""

    label: str
    server: VllmServer
    transport: str | None = None
    """How it pulls embeddings; None where it encodes images itself."""
    noise: bool = False
    answers: list[Answer] = field(default_factory=list)
    pulls: int = 0
    pull_bytes: int = 0

    @property
    def seconds(self) -> float:
        return sum(answer.seconds for answer in self.answers)


class DemoError(Exception):
    """There is no sense in going on."""


def main() -> int:
    before = snapshot()
    code, failures = 1, []
    try:
        with Stack() as stack:
            failures = until_interrupted(stack)
    except KeyboardInterrupt:
        code, failures = INTERRUPTED, ["interrupted"]
    except (ServiceError, DemoError) as error:
        failures = [str(error)]
    left = leftovers(before)
    if not left:
        say("left behind: no process, no shared memory, no port")
    failures += [f"left behind: {thing}" for thing in left]
    for failure in failures:
        print(f"FAILED: {failure}")
    print("DEMO FAILED" if failures else "DEMO OK")
    return code if failures else 0


def until_interrupted(stack: Stack) -> list[str]:
    try:
        return show(stack)
    except KeyboardInterrupt:
        say("interrupted: stopping all servers, which takes some seconds")
        raise


def show(stack: Stack) -> list[str]:
    """Run everything and print it; what failed, a line each."""
    say("making a tiny Qwen2.5-VL with seeded weights, or taking it from .cache")
    producer, runs = servers(cached_checkpoint(FAMILY))
    say(f"starting plain vLLM, ec-producer and three LLM-only vLLMs; logs are in {LOGS_DIR.relative_to(ROOT)}")
    for service in (producer, *(run.server for run in runs)):
        stack.start(service)
    stack.wait_ready(say)
    for run in runs:
        question_all(run, producer)
    say("stopping all servers")
    endings = stack.stop_all()
    print_answers(runs)
    print_totals(runs)
    return [*check_answers(runs), *check_pulls(runs), *check_endings(endings)]


def servers(model: Path) -> tuple[ProducerServer, list[Run]]:
    producer = ProducerServer(model, name="ec-producer", transports=TRANSPORTS)

    def consumer(name: str, transport: str, connector: tuple[str, str] = SHIM_CONNECTOR) -> VllmServer:
        flags = consumer_args(producer.address, transport, connector=connector)
        env = {"PYTHONPATH": str(ROOT)} if connector == NOISE_CONNECTOR else {}
        return VllmServer(model, name=name, extra_args=flags, env=env)

    return producer, [
        Run(label="plain vLLM", server=VllmServer(model, name="vllm-plain")),
        Run(label="over gRPC", server=consumer("vllm-grpc", "grpc"), transport="grpc"),
        Run(label="over NIXL", server=consumer("vllm-nixl", "nixl"), transport="nixl"),
        Run(label="noise", server=consumer("vllm-noise", "grpc", NOISE_CONNECTOR), transport="grpc", noise=True),
    ]


def question_all(run: Run, producer: ProducerServer) -> None:
    """Ask every question, one after the other, and count what it took."""
    pulls, pull_bytes = counts(producer, run.transport)
    say(f"asking {run.label}: {len(QUESTIONS)} questions about {NUM_PICTURES} pictures")
    run.answers = [answer(run, question) for question in QUESTIONS]
    deadline = time.monotonic() + COUNT_TIMEOUT_S
    while run.transport and run.pulls < NUM_PICTURES and time.monotonic() < deadline:
        now = counts(producer, run.transport)
        run.pulls, run.pull_bytes = now[0] - pulls, now[1] - pull_bytes


def answer(run: Run, question: Question) -> Answer:
    try:
        return ask(run.server.url, chat_request(question.parts(), stream=question.stream))
    except (ChatError, httpx.HTTPError) as error:
        raise DemoError(f"{question.title}, {run.label}: {error!r}; its log is {run.server.log}") from error


def counts(producer: ProducerServer, transport: str | None) -> tuple[int, int]:
    """Pulls and their bytes so far, as the producer's own metrics count them."""
    if transport is None:
        return 0, 0
    names = ("ec_producer_pulls_total", "ec_producer_pull_bytes_total")
    pulls, pull_bytes = (int(producer.metric(name, transport=transport)) for name in names)
    return pulls, pull_bytes


def check_answers(runs: list[Run]) -> Iterator[str]:
    """Every answer equals plain vLLM's, except where noise replaced the image."""
    for run in runs[1:]:
        for question, expected, got in zip(QUESTIONS, runs[0].answers, run.answers, strict=True):
            if run.noise and got.token_ids == expected.token_ids:
                yield f"{question.title}: noise in place of the image did not change the answer"
            if not run.noise:
                yield from (f"{question.title}, {run.label}: {what}" for what in differences(expected, got))


def check_pulls(runs: list[Run]) -> Iterator[str]:
    """Every picture came from the producer, over the run's own transport."""
    for run in runs:
        if run.transport and (run.pulls != NUM_PICTURES or not run.pull_bytes):
            yield f"{run.label}: {run.pulls} pulls of {run.pull_bytes} bytes for {NUM_PICTURES} pictures"


def check_endings(endings: dict[str, Ending]) -> Iterator[str]:
    """Every server ended by itself when it was told to."""
    for name, ending in endings.items():
        yield from (f"{name} had to be killed: {process}" for process in ending.killed)
        if ending.code:
            yield f"{name} ended with exit code {ending.code}"


def differences(expected: Answer, got: Answer) -> Iterator[str]:
    """Where two answers part, in words."""
    if got.token_ids != expected.token_ids:
        yield f"tokens differ from plain vLLM's: {list(got.token_ids)} instead of {list(expected.token_ids)}"
    if got.logprobs != expected.logprobs:
        yield f"logprobs differ from plain vLLM's: {list(got.logprobs)} instead of {list(expected.logprobs)}"


def print_answers(runs: list[Run]) -> None:
    for i, question in enumerate(QUESTIONS):
        print(f"\n{question.title} ({', '.join(question.pictures)}): {question.text}")
        print("              tokens     logprobs")
        print("              identical  identical     time  token ids")
        for run in runs:
            answer, plain = run.answers[i], runs[0].answers[i]
            same = (
                ("", "")
                if run is runs[0]
                else (yes(answer.token_ids == plain.token_ids), yes(answer.logprobs == plain.logprobs))
            )
            tokens = " ".join(f"{token:3}" for token in answer.token_ids)
            print(f"  {run.label:10}  {same[0]:9}  {same[1]:9}  {answer.seconds:5.2f} s  {tokens}")


def print_totals(runs: list[Run]) -> None:
    print(f"\n{len(QUESTIONS)} questions, {NUM_PICTURES} pictures   pulls       bytes     time")
    for run in runs:
        pulled = f"{run.pulls:5}  {run.pull_bytes:10,}" if run.transport else f"{'-':>5}  {'-':>10}"
        print(f"  {run.label:10}             {pulled}  {run.seconds:5.2f} s")
    print()


def yes(same: bool) -> str:
    return "yes" if same else "no"


def say(text: str) -> None:
    print(f"{time.monotonic() - started_s:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
