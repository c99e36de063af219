"""`make demo`: the same questions about the same photographs, to plain vLLM and through ec-producer.

    python -m tests.demo [--model FAMILY] [--transport TRANSPORT]

For each model, side by side on loopback ports: plain vLLM with its own encoder, one `ec-producer serve`, and LLM-only
vLLMs that pull each embedding from it over their transports. The last question is asked with noise in the embedding's
place, and so must be answered otherwise. Ends with a table, `DEMO OK` and 0, or with a line for each failure,
`DEMO FAILED` and 1.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.kit.chat import Answer, ChatError, ask, chat_request
from tests.kit.checkpoints import cached_checkpoint
from tests.kit.leftovers import leftovers, snapshot
from tests.kit.models import FAMILIES
from tests.kit.photos import Photo, photos
from tests.kit.processes import LOGS_DIR, Ending, ServiceError
from tests.kit.servers import NOISE_CONNECTOR, NOISE_SWITCH, ProducerServer, VllmServer, consumer_args
from tests.kit.stack import Stack

ROOT = Path(__file__).parents[1]
TRANSPORTS = ("grpc", "nixl", "mooncake", "shm")
MODELS = {"qwen2_5_vl": ("grpc", "nixl"), "qwen3_vl": ("mooncake",), "internvl": ("shm",)}
"""What is shown by default: models of three kinds, and each transport once."""
INTERRUPTED = 130

started_s = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    title: str
    pictures: tuple[str, ...]
    text: str
    stream: bool = False
    noise: bool = False
    """Asked with noise in place of embeddings; about pictures of its own, since vLLM keeps what it has."""

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
    Question(title="noise for an image", pictures=("rocket.jpg",), text="What is this?", noise=True),
)
NUM_PICTURES = sum(len(question.pictures) for question in QUESTIONS)


@dataclass(slots=True, kw_only=True)
class Run:
    """One vLLM, and what it answered."""

    model: str
    server: VllmServer
    transport: str | None = None
    """How it pulls embeddings; None where it encodes images itself."""
    answers: list[Answer] = field(default_factory=list)
    pulls: int = 0
    pull_bytes: int = 0

    @property
    def label(self) -> str:
        return self.transport or "plain vLLM"

    @property
    def seconds(self) -> float:
        return sum(answer.seconds for answer in self.answers)


class DemoError(Exception):
    """There is no sense in going on."""


def main(arguments: Sequence[str] | None = None) -> int:
    models = chosen(arguments)
    before = snapshot()
    code, failures = 1, []
    try:
        with Stack() as stack, tempfile.TemporaryDirectory(prefix="ec-demo-") as folder:
            failures = until_interrupted(stack, models, Path(folder) / "noise")
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


def chosen(arguments: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Transports by model."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description="Plain vLLM next to ec-producer.")
    images = [name for name, family in FAMILIES.items() if "image" in family.modalities]
    parser.add_argument("--model", choices=images, help="one model, over each transport")
    parser.add_argument("--transport", choices=TRANSPORTS, help="one transport")
    options = parser.parse_args(arguments)
    models = {options.model: TRANSPORTS} if options.model else MODELS
    return dict.fromkeys(models, (options.transport,)) if options.transport else models


def until_interrupted(stack: Stack, models: dict[str, tuple[str, ...]], switch: Path) -> list[str]:
    try:
        return show(stack, models, switch)
    except KeyboardInterrupt:
        say("interrupted: stopping all servers, which takes some seconds")
        raise


def show(stack: Stack, models: dict[str, tuple[str, ...]], switch: Path) -> list[str]:
    """Run everything and print it; what failed, a line each."""
    say(f"logs are in {LOGS_DIR.relative_to(ROOT)}, tiny models with seeded weights in .cache/checkpoints")
    failures: list[str] = []
    shown: list[list[Run]] = []
    for model, transports in models.items():
        producer, runs = servers(model, transports, switch)
        say(f"{model}: starting plain vLLM, ec-producer, and an LLM-only vLLM for {', '.join(transports)}")
        for service in (producer, *(run.server for run in runs)):
            stack.start(service)
        stack.wait_ready(say)
        for run in runs:
            question_all(run, producer, switch)
        say(f"{model}: stopping its servers")
        endings = stack.stop_all()
        print_answers(runs)
        shown.append(runs)
        failures += [*check_answers(runs), *check_pulls(runs), *check_endings(endings)]
    print_table(shown)
    return failures


def servers(family: str, transports: Sequence[str], switch: Path) -> tuple[ProducerServer, list[Run]]:
    model = cached_checkpoint(family)
    producer = ProducerServer(model, name=f"{family}-producer", transports=transports)
    runs = [Run(model=family, server=VllmServer(model, name=f"{family}-plain"))]
    for transport in transports:
        flags = consumer_args(
            producer.address, transport, connector=NOISE_CONNECTOR, without=FAMILIES[family].without_encoder
        )
        env = {"PYTHONPATH": str(ROOT), NOISE_SWITCH: str(switch)}
        server = VllmServer(model, name=f"{family}-{transport}", extra_args=flags, env=env)
        runs.append(Run(model=family, server=server, transport=transport))
    return producer, runs


def question_all(run: Run, producer: ProducerServer, switch: Path) -> None:
    """Ask every question, one after the other, and count what it took."""
    before = counts(producer, run.transport)
    say(f"asking {run.model}, {run.label}: {len(QUESTIONS)} questions about {NUM_PICTURES} pictures")
    for question in QUESTIONS:
        if question.noise:
            switch.touch()
        run.answers.append(answer(run, question))
        switch.unlink(missing_ok=True)
    after = counts(producer, run.transport, before[0] + NUM_PICTURES)
    run.pulls, run.pull_bytes = after[0] - before[0], after[1] - before[1]


def answer(run: Run, question: Question) -> Answer:
    try:
        return ask(run.server.url, chat_request(question.parts(), stream=question.stream))
    except (ChatError, httpx.HTTPError) as error:
        raise DemoError(
            f"{run.model}, {run.label}, {question.title}: {error!r}; its log is {run.server.log}"
        ) from error


def counts(producer: ProducerServer, transport: str | None, least: int = 0) -> tuple[int, int]:
    """Pulls (once there are at least so many) and their bytes so far, as the producer's own metrics count them."""
    if transport is None:
        return 0, 0
    pulls = producer.metric_reaching(least, "ec_producer_pulls_total", transport=transport)
    return int(pulls), int(producer.metric("ec_producer_pull_bytes_total", transport=transport))


def check_answers(runs: list[Run]) -> Iterator[str]:
    """Every answer equals plain vLLM's, except where noise replaced the image."""
    for run in runs[1:]:
        for question, expected, got in zip(QUESTIONS, runs[0].answers, run.answers, strict=True):
            where = f"{run.model}, {run.label}, {question.title}"
            if question.noise and got.token_ids == expected.token_ids:
                yield f"{where}: noise in place of the image did not change the answer"
            if not question.noise:
                yield from (f"{where}: {what}" for what in differences(expected, got))


def check_pulls(runs: list[Run]) -> Iterator[str]:
    """Every picture came from the producer, over the run's own transport."""
    for run in runs:
        if run.transport and (run.pulls != NUM_PICTURES or not run.pull_bytes):
            yield f"{run.model}, {run.label}: {run.pulls} pulls of {run.pull_bytes} bytes for {NUM_PICTURES} pictures"


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
        print(f"\n{runs[0].model}: {question.title} ({', '.join(question.pictures)}): {question.text}")
        for run in runs:
            tokens = " ".join(f"{token:3}" for token in run.answers[i].token_ids)
            print(f"  {run.label:10}  {run.answers[i].seconds:5.2f} s  {tokens}")
    print()


def print_table(shown: list[list[Run]]) -> None:
    """One line for each vLLM; what is 'identical' equals plain vLLM's in all questions without noise."""
    print(f"\n{'':24}  tokens     logprobs   noise     {NUM_PICTURES} pictures")
    print("model       transport     identical  identical  changes   pulls       bytes     time")
    for runs in shown:
        for run in runs:
            pairs = list(zip(QUESTIONS, runs[0].answers, run.answers, strict=True))
            clean = [(plain, got) for question, plain, got in pairs if not question.noise]
            noisy = [(plain, got) for question, plain, got in pairs if question.noise]
            cells = ("", "", "", "", "")
            if run.transport:
                cells = (
                    yes(all(plain.token_ids == got.token_ids for plain, got in clean)),
                    yes(all(plain.logprobs == got.logprobs for plain, got in clean)),
                    yes(all(plain.token_ids != got.token_ids for plain, got in noisy)),
                    str(run.pulls),
                    f"{run.pull_bytes:,}",
                )
            tokens, logprobs, noise, pulls, pull_bytes = cells
            print(
                f"{run.model:10}  {run.label:12}  {tokens:9}  {logprobs:9}  {noise:7}  {pulls:>6}  {pull_bytes:>10}"
                f"  {run.seconds:5.2f} s"
            )
    print()


def yes(same: bool) -> str:
    return "yes" if same else "no"


def say(text: str) -> None:
    print(f"{time.monotonic() - started_s:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
