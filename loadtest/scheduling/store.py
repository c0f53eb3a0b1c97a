"""What was measured so far, step by step, in a file: so that it can be measured in several sittings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadtest.errors import BenchError

if TYPE_CHECKING:
    from pathlib import Path


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

    def named(self, prefix: str) -> dict[str, Any]:
        """The steps whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): found for name, found in self.steps.items() if name.startswith(prefix)}
