"""Measurements by step in a file, so that a benchmark can take several sittings."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bertserve.loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Step = tuple[str, Callable[[], Any]]

_ALMOST = 0.99


@dataclass(slots=True)
class Store:
    """Steps by name, as JSON values, and their common facts: machine, model, length of a measurement.

    `command` is the command line of the latest measurement of a step.
    """

    path: Path
    facts: dict[str, Any]
    steps: dict[str, Any] = field(default_factory=dict)
    command: str = ""

    @classmethod
    def read(cls, path: Path) -> Store:
        """The content of the file; raises BenchError if there is none, or it is no store."""
        try:
            content = json.loads(path.read_bytes())
            return cls(path, content["facts"], content["steps"], content.get("command", ""))
        except OSError as error:
            raise BenchError(f"{path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path} holds no measurements ({type(error).__name__}: {error})") from error

    @classmethod
    def open(cls, path: Path, facts: dict[str, Any], *, fresh: bool) -> Store:
        """The content of the file, or an empty store; raises BenchError if its facts differ."""
        if fresh or not path.exists():
            return cls(path, facts)
        store = cls.read(path)
        for name, value in facts.items():
            if store.facts.get(name) != value:
                raise BenchError(f"{path} was measured with another {name}; start afresh with --fresh")
        return store

    def keep(self, name: str, value: Any) -> None:  # noqa: ANN401  whatever JSON holds
        """Adds a step and writes the file atomically."""
        self.steps[name] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        steps = ",\n".join(f"{json.dumps(name)}:{_compact(step)}" for name, step in self.steps.items())
        staged = self.path.with_suffix(".new")
        staged.write_text(
            f'{{"command":{json.dumps(self.command)},\n"facts":{_compact(self.facts)},\n"steps":{{\n{steps}\n}}}}\n',
            encoding="utf-8",
        )
        staged.replace(self.path)

    def fill(
        self, steps: Iterable[Step], minutes: float, wanted: str, say: Callable[[str], None], *, again: bool = False
    ) -> None:
        """Measures the missing steps, in order.

        Args:
            steps: Names of the steps, and the measurement of each.
            minutes: Time limit. No step begins that would end later, if it takes as long as the longest before it.
            wanted: A regular expression; steps whose names do not match it are skipped.
            say: Shows the progress.
            again: Whether wanted steps are measured again.

        Raises:
            BenchError: No step is wanted, or a step failed; earlier steps are kept.
        """
        started, longest, is_wanted = time.monotonic(), 0.0, False
        for name, measure in steps:
            if not re.search(wanted, name):
                continue
            is_wanted = True
            if name in self.steps and not again:
                continue
            begun = time.monotonic()
            if begun - started + longest > 60 * minutes:
                say(f"no time for another step within {minutes:g} minutes: run it again to go on")
                return
            say(name)
            self.keep(name, measure())
            longest = max(longest, time.monotonic() - begun)
        if not is_wanted:
            raise BenchError(f"there is no step {wanted!r}")

    def named(self, prefix: str) -> dict[str, Any]:
        """Steps whose names have this prefix, by the rest of their names."""
        return {name.removeprefix(prefix): value for name, value in self.steps.items() if name.startswith(prefix)}


def _compact(value: Any) -> str:  # noqa: ANN401  whatever JSON holds
    return json.dumps(_rounded(value), separators=(",", ":"))


def _rounded(value: Any) -> Any:  # noqa: ANN401  likewise
    """The value with four significant digits in each float, as no measurement has more, but for cosines near 1."""
    if isinstance(value, float):
        return float(f"{value:.{7 if _ALMOST < value < 1 else 4}g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
