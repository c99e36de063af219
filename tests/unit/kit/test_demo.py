"""What the demo counts as a failure."""

from pathlib import Path

import pytest

from tests import demo
from tests.demo import (
    NUM_PICTURES,
    QUESTIONS,
    TRANSPORTS,
    Run,
    check_answers,
    check_endings,
    check_pulls,
    chosen,
    print_table,
)
from tests.kit.chat import Answer
from tests.kit.photos import photos
from tests.kit.processes import Ending, ServiceError
from tests.kit.servers import VllmServer


def answer(first: int = 1, logprob: float = -0.5) -> Answer:
    return Answer(token_ids=(first, 2), logprobs=(logprob, -1.0), text="ab", seconds=0.1)


def answers(**changes: Answer) -> list[Answer]:
    """One a question, with noise another; `first` and `noise` replace those of the first and of the one with noise."""
    found = [answer(first=9) if question.noise else answer() for question in QUESTIONS]
    places = {"first": 0, "noise": next(place for place, question in enumerate(QUESTIONS) if question.noise)}
    for name, change in changes.items():
        found[places[name]] = change
    return found


def run(transport: str | None = "grpc", pulls: int = NUM_PICTURES, **changes: Answer) -> Run:
    return Run(
        model="tiny",
        server=VllmServer(Path("never-started")),
        transport=transport,
        answers=answers(**changes) if transport else [answer()] * len(QUESTIONS),
        pulls=pulls,
        pull_bytes=pulls * 100,
    )


PLAIN = run(transport=None, pulls=0)


def test_equal_answers_and_changed_noise_pass() -> None:
    assert list(check_answers([PLAIN, run(), run("nixl")])) == []


@pytest.mark.parametrize(("other", "what"), [(answer(first=9), "tokens"), (answer(logprob=-0.25), "logprobs")])
def test_a_difference_is_named_with_its_question(other: Answer, what: str) -> None:
    (failure,) = check_answers([PLAIN, run("nixl", first=other)])
    assert failure.startswith(f"tiny, nixl, {QUESTIONS[0].title}: {what} differ")


def test_noise_that_changes_nothing_is_a_failure() -> None:
    (failure,) = check_answers([PLAIN, run(noise=answer())])
    assert "noise in place of the image did not change the answer" in failure


def test_each_picture_must_be_pulled() -> None:
    assert list(check_pulls([PLAIN, run()])) == []
    assert len(list(check_pulls([run(pulls=NUM_PICTURES - 1)]))) == 1


def test_the_table_says_what_is_identical(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([[PLAIN, run(), run("shm", first=answer(logprob=-0.25)), run("nixl", noise=answer())]])
    cells = {line.split()[1]: line.split()[2:5] for line in capsys.readouterr().out.splitlines() if "tiny" in line}
    assert cells["grpc"] == ["yes", "yes", "yes"]
    assert cells["shm"] == ["yes", "no", "yes"]
    assert cells["nixl"] == ["yes", "yes", "no"]


def test_by_default_three_models_and_each_transport() -> None:
    models = chosen([])
    assert len(models) == 3
    assert sorted(transport for transports in models.values() for transport in transports) == sorted(TRANSPORTS)


def test_a_model_and_a_transport_may_be_chosen() -> None:
    assert chosen(["--model", "gemma3"]) == {"gemma3": TRANSPORTS}
    assert chosen(["--transport", "shm"]) == dict.fromkeys(chosen([]), ("shm",))
    assert chosen(["--model", "gemma3", "--transport", "nixl"]) == {"gemma3": ("nixl",)}


@pytest.mark.parametrize("arguments", [["--model", "qwen2_audio"], ["--model", "gpt"], ["--transport", "pigeon"]])
def test_others_are_refused_with_those_that_there_are(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chosen(arguments)
    assert "choose from" in capsys.readouterr().err


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
    def fail(*_: object) -> list[str]:
        raise error

    monkeypatch.setattr(demo, "show", fail)
    assert demo.main([]) == code
    assert capsys.readouterr().out.splitlines()[-2:] == [line, "DEMO FAILED"]
