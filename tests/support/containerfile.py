"""A container file as a list of stages, as far as ours use the language (docs.docker.com/reference/dockerfile)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_FROM = re.compile(r"(?P<base>\S+)(?: AS (?P<name>\S+))?")
_CONTINUED = re.compile(r"\\\n")
_COMMENT = re.compile(r"^#.*\n", re.MULTILINE)


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return [rest for known, rest in self.instructions if known == word]


def stages(path: Path) -> list[Stage]:
    found: list[Stage] = []
    text = _CONTINUED.sub(" ", _COMMENT.sub("", path.read_text(encoding="utf-8")))
    for line in filter(None, map(str.strip, text.splitlines())):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            match = _FROM.fullmatch(rest)
            assert match is not None, line
            found.append(Stage(match["name"] or "", match["base"]))
        else:
            found[-1].instructions.append((word, rest))
    return found


def lineage(all_stages: list[Stage], name: str) -> list[tuple[str, str]]:
    """All instructions that make a stage, those of the stages that it stands on first."""
    stage = next(stage for stage in all_stages if stage.name == name)
    below = lineage(all_stages, stage.base) if any(other.name == stage.base for other in all_stages) else []
    return below + stage.instructions


def words(rest: str) -> list[str]:
    """An instruction in its exec form, which needs no shell; `ValueError` in the other form."""
    found: list[str] = json.loads(rest)
    return found
