"""The process in which libFuzzer drives one target: `python -m tests.fuzz.engine TARGET FLAGS FOLDERS`, libFuzzer's."""

import random
import sys

import atheris

from tests.fuzz.targets import TARGETS


def main() -> None:
    name, *arguments = sys.argv[1:]
    with atheris.instrument_imports(include=list(TARGETS[name].instrumented)):
        run, mutate = TARGETS[name].load()

    def changed(data: bytes, most: int, seed: int) -> bytes:
        return mutate(data, most, random.Random(seed), atheris.Mutate)

    # The first word is what libFuzzer starts again, through a shell, to minimise a corpus.
    again = f"{sys.executable} -m tests.fuzz.engine {name}"
    atheris.Setup([again, *arguments], run, custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
