"""The samples of a comparison, kept in a file so that it can be measured in several sittings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from loadtest.errors import BenchError
from loadtest.report.sample import Sample, Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from loadtest.benchmarks.peers.subjects import Subject

Round = dict[tuple[str, int], Sample]
"""The samples of one round at one length, by the name of the subject and the connections."""


@dataclass(slots=True, frozen=True)
class Facts:
    """What samples must have in common to stand in one table.

    Attributes:
        machine: Where they were measured.
        model: Name, version and digests.
        seconds: Length of a measurement.
    """

    machine: dict[str, str]
    model: dict[str, str]
    seconds: float


@dataclass(slots=True)
class Store:
    """Everything measured so far.

    Attributes:
        facts: What all samples have in common.
        lengths: Complete rounds by the number of tokens.
        likeness: The least cosine to the fp32 model's vectors, by subject.
        versions: What each peer consists of, package by package.
        idle_percent: CPU of each server while nobody asked it, in percent of one core.
    """

    facts: Facts
    lengths: dict[int, list[Round]] = field(default_factory=dict)
    likeness: dict[str, float] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    idle_percent: dict[str, float] = field(default_factory=dict)

    def figure(self, tokens: int, subject: Subject, connections: int, name: str) -> Spread:
        """A field of a subject's samples, over the rounds of a length."""
        key = (subject.name, connections)
        return self._spread(tokens, [key], lambda samples: float(getattr(samples[key], name)))

    def ratio(self, tokens: int, ours: Subject, theirs: Subject, connections: int, name: str) -> Spread:
        """Ours divided by theirs, each of the same round."""
        keys = [(subject.name, connections) for subject in (ours, theirs)]
        return self._spread(
            tokens, keys, lambda samples: getattr(samples[keys[0]], name) / getattr(samples[keys[1]], name)
        )

    def above(self, tokens: int, ours: Subject, theirs: Subject, connections: int, name: str) -> Spread:
        """Ours less theirs, each of the same round."""
        keys = [(subject.name, connections) for subject in (ours, theirs)]
        return self._spread(
            tokens, keys, lambda samples: getattr(samples[keys[0]], name) - getattr(samples[keys[1]], name)
        )

    def _spread(self, tokens: int, keys: Sequence[tuple[str, int]], figure: Callable[[Round], float]) -> Spread:
        """Over the rounds in which nobody else used the machine; over all where there is none."""
        rounds = self.lengths[tokens]
        quiet = [samples for samples in rounds if all(samples[key].quiet for key in keys)]
        return Spread.of([figure(samples) for samples in quiet or rounds])

    def write(self, path: Path) -> None:
        """Writes it, whole or not at all."""
        rounds = {
            str(tokens): [
                [{"subject": name, "connections": count, **asdict(sample)} for (name, count), sample in samples.items()]
                for samples in found
            ]
            for tokens, found in sorted(self.lengths.items())
        }
        content = {
            **asdict(self.facts),
            "versions": self.versions,
            "least_cosine": self.likeness,
            "idle_percent": self.idle_percent,
            "rounds_by_tokens": rounds,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)


def read(path: Path, facts: Facts) -> Store:
    """What was measured before; nothing where the file is not there.

    Raises:
        BenchError: It was measured on another machine, of another model or with other settings.
    """
    if not path.exists():
        return Store(facts)
    content = json.loads(path.read_bytes())
    for name, value in asdict(facts).items():
        if content[name] != value:
            raise BenchError(f"{path} was measured with another {name}; start afresh with --fresh")
    lengths = {
        int(tokens): [_round(samples) for samples in found] for tokens, found in content["rounds_by_tokens"].items()
    }
    return Store(facts, lengths, content["least_cosine"], content["versions"], content["idle_percent"])


def _round(samples: Iterable[dict[str, Any]]) -> Round:
    found = {}
    for fields in samples:
        key = (str(fields.pop("subject")), int(fields.pop("connections")))
        found[key] = Sample(**fields)
    return found
