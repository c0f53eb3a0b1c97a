"""What was measured so far, step by step, in a file: so that it can be measured in several sittings."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.errors import BenchError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable


@dataclass(slots=True)
class Store:
    """Steps by name.

    Attributes:
        path: Of the file.
        facts: What all steps have in common: the machine, the model, the texts.
        steps: What each found; plain values.
    """

    path: Path
    facts: dict[str, Any]
    steps: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, facts: dict[str, Any], *, fresh: bool) -> Store:
        """What the file holds, or nothing.

        Raises:
            BenchError: It was measured under other circumstances.
        """
        if fresh or not path.exists():
            return cls(path, facts)
        content = json.loads(path.read_bytes())
        for name, value in facts.items():
            if content["facts"].get(name) != value:
                raise BenchError(f"{path} was measured with another {name}; start afresh with --fresh")
        return cls(path, facts, content["steps"])

    def keep(self, name: str, found: Any) -> None:  # noqa: ANN401  whatever JSON holds
        """Adds a step and writes the file, whole or not at all."""
        self.steps[name] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps({"facts": self.facts, "steps": self.steps}, indent=1) + "\n", encoding="utf-8")
        aside.replace(self.path)

    def fill(
        self, steps: Iterable[tuple[str, Callable[[], Any]]], minutes: float, is_wanted: Callable[[str], bool]
    ) -> None:
        """Measures the steps that are missing, and says which.

        Args:
            steps: Their names and what finds each of them, in order.
            minutes: None begins after so long.
            is_wanted: Told a step's name; what is not wanted now is left out.

        Raises:
            BenchError: As a step does; those before it are kept.
        """
        limit = time.monotonic() + 60 * minutes
        for name, find in steps:
            if name in self.steps or not is_wanted(name):
                continue
            if time.monotonic() > limit:
                print(f"{minutes:g} minutes are over: run it again to go on", file=sys.stderr)
                break
            print(name, file=sys.stderr, flush=True)
            self.keep(name, find())

    def named(self, prefix: str) -> dict[str, Any]:
        """The steps whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): found for name, found in self.steps.items() if name.startswith(prefix)}


def add_options(parser: argparse.ArgumentParser, out: str) -> None:
    """What every measurement in sittings is told; `out` is where its figures usually are."""
    parser.add_argument("--models", type=Path, default=Path("models"), help="model repository")
    parser.add_argument("--precision", default="auto", help="as `bertserve serve` has it")
    parser.add_argument("--out", type=Path, default=Path(out), help="file of the figures")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no step after so long")
    parser.add_argument("--fresh", action="store_true", help="throw away what the file holds")
    parser.add_argument("--page-only", action="store_true", help="measure nothing, write the page anew")
