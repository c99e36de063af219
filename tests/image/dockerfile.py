"""A Dockerfile as its stages and instructions: what the rules of this folder are asked of."""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Stage:
    """One FROM and what follows it; `parents` are the stages that it builds on, the nearest first."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)
    parents: "list[Stage]" = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        """Arguments of that instruction, those of the stages below first."""
        line = [*reversed(self.parents), self]
        return [words for stage in line for found, words in stage.instructions if found == keyword]

    def pairs(self, keyword: str) -> dict[str, str]:
        """`name=value` of ENV or LABEL, quotes removed."""
        found = re.findall(r'([\w.]+)=("[^"]*"|\S+)', " ".join(self.all(keyword)))
        return {name: value.strip('"') for name, value in found}


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """`arguments` are the global ARGs: their defaults by name, None where there is none."""

    arguments: dict[str, str | None]
    stages: dict[str, Stage]


def read_dockerfile(path: Path = ROOT / "Dockerfile") -> Dockerfile:
    """Parses what this repository's Dockerfile uses of the language: no heredocs, each stage named."""
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#"))
    arguments: dict[str, str | None] = {}
    stages: dict[str, Stage] = {}
    stage = None
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        keyword, _, words = line.partition(" ")
        if keyword == "FROM":
            base, _, name = words.partition(" AS ")
            parents = [stages[base], *stages[base].parents] if base in stages else []
            stage = stages[name] = Stage(base, name, parents=parents)
        elif keyword and stage:
            stage.instructions.append((keyword, words))
        elif keyword == "ARG":
            name, has_default, default = words.partition("=")
            arguments[name] = default if has_default else None
    return Dockerfile(arguments, stages)
