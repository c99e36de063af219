"""What the demo counts as a failure."""

from pathlib import Path

import pytest

from tests import demo
from tests.demo import NUM_PICTURES, QUESTIONS, Run, check_answers, check_endings, check_pulls
from tests.kit.chat import Answer
from tests.kit.photos import photos
from tests.kit.processes import Ending, ServiceError
from tests.kit.servers import VllmServer


def answer(first: int = 1, logprob: float = -0.5) -> Answer:
    return Answer(token_ids=(first, 2), logprobs=(logprob, -1.0), text="ab", seconds=0.1)


def run(label: str, *answers: Answer, noise: bool = False, pulls: int = NUM_PICTURES) -> Run:
    return Run(
        label=label,
        server=VllmServer(Path("never-started")),
        transport=None if label == "plain" else "grpc",
        noise=noise,
        answers=list(answers) or [answer()] * len(QUESTIONS),
        pulls=pulls,
        pull_bytes=pulls * 100,
    )


def test_equal_answers_and_changed_noise_pass() -> None:
    noise = run("noise", *[answer(first=9)] * len(QUESTIONS), noise=True)
    assert list(check_answers([run("plain"), run("over gRPC"), noise])) == []


@pytest.mark.parametrize(("other", "what"), [(answer(first=9), "tokens"), (answer(logprob=-0.25), "logprobs")])
def test_a_difference_is_named_with_its_question(other: Answer, what: str) -> None:
    different = run("over NIXL", *[answer()] * (len(QUESTIONS) - 1), other)
    (failure,) = check_answers([run("plain"), different])
    assert failure.startswith(f"{QUESTIONS[-1].title}, over NIXL: {what} differ")


def test_noise_that_changes_nothing_is_a_failure() -> None:
    assert len(list(check_answers([run("plain"), run("noise", noise=True)]))) == len(QUESTIONS)


def test_each_picture_must_be_pulled() -> None:
    assert list(check_pulls([run("plain", pulls=0), run("over gRPC")])) == []
    assert len(list(check_pulls([run("over gRPC", pulls=NUM_PICTURES - 1)]))) == 1


def test_a_server_must_end_by_itself() -> None:
    endings = {"one": Ending(code=0, killed=()), "two": Ending(code=137, killed=("42 python",))}
    assert list(check_endings(endings)) == ["two had to be killed: 42 python", "two ended with exit code 137"]


def test_questions_ask_about_photographs_that_exist() -> None:
    assert {name for question in QUESTIONS for name in question.pictures} <= set(photos())


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(KeyboardInterrupt(), demo.INTERRUPTED, "FAILED: interrupted"), (ServiceError("no model"), 1, "FAILED: no model")],
)
def test_whatever_ends_it_is_said_last(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> list[str]:
        raise error

    monkeypatch.setattr(demo, "show", fail)
    assert demo.main() == code
    assert capsys.readouterr().out.splitlines()[-2:] == [line, "DEMO FAILED"]
