"""Loads of the benchmarks: an open loop of real texts of known lengths against one server, and a closed loop."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from bertserve.loadtest.generator.child import Child
from bertserve.loadtest.generator.run import Kind, Load, run
from bertserve.loadtest.generator.scenario import Phase, Scenario
from bertserve.loadtest.generator.workload import sentence_words
from bertserve.loadtest.report.result import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bertserve.loadtest.generator.messages import Target
    from bertserve.loadtest.generator.workload import Bundle

SLO_MS = 250.0
"""A later answer is not good."""

_TEXTS, _MIN_WORDS, _MAX_WORDS = 200, 6, 250
_PATIENCE_S = 10.0
_WARM_UP_S, _ASK_S = 0.5, 60.0


@dataclass(slots=True, frozen=True)
class Workload:
    """Texts, each a kind of its own, so that the length of every request is known in tokens as the model takes them."""

    kinds: tuple[Kind, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, texts: Sequence[str], tokens: Sequence[int]) -> Workload:
        kinds = tuple(Kind(str(index), "embed", 1.0, (text,)) for index, text in enumerate(texts))
        return cls(kinds, tuple(tokens))

    @property
    def texts(self) -> list[str]:
        return [str(kind.texts[0]) for kind in self.kinds]


def mixed_texts(bundle: Bundle) -> Workload:
    """Consecutive words of real English, 6 to 250 in even steps. The server truncates longer texts."""
    words, dice = sentence_words(), random.Random(1)
    texts = []
    for index in range(_TEXTS):
        count = round(_MIN_WORDS + (_MAX_WORDS - _MIN_WORDS) * index / (_TEXTS - 1))
        start = dice.randrange(len(words))
        texts.append(" ".join(words[(start + step) % len(words)] for step in range(count)))
    counter = Tokenizer.from_str((bundle.path / "tokenizer.json").read_text(encoding="utf-8"))
    encoded = counter.encode_batch_fast(texts)
    return Workload.of(texts, [min(bundle.max_length, len(encoding.ids)) for encoding in encoded])


def even(seconds: float) -> tuple[Phase, ...]:
    """One phase at the full rate."""
    return (Phase(seconds, 1, 1),)


@dataclass(slots=True)
class Recorded(Result):
    """A result that keeps every request, in pieces as the generators report them."""

    records: list[NDArray[np.void]] = field(default_factory=list)

    def take(self, records: NDArray[np.void], faults: Sequence[str], kinds: Sequence[str]) -> None:
        """Keeps the records in addition to summing them up."""
        Result.take(self, records, faults, kinds)  # a class with slots has lost what `super()` looks for
        self.records.append(records)


@dataclass(slots=True, frozen=True)
class Requests:
    """Outcomes of a run's requests, in arrays of equal length.

    Attributes:
        intended: Scheduled send time, in seconds from the start.
        latency_ms: Time from `intended` to the answer or the refusal.
        answered: Whether the request has an answer.
        tokens: Tokens of the text.
    """

    intended: NDArray[np.float64]
    latency_ms: NDArray[np.float64]
    answered: NDArray[np.bool_]
    tokens: NDArray[np.int64]

    @classmethod
    def of(cls, recorded: Recorded, tokens: Sequence[int]) -> Requests:
        """The requests of a run over texts of these lengths in tokens."""
        every = np.concatenate(recorded.records)
        latency_ms = (every["done"] - every["intended"]) * 1e3
        return cls(every["intended"], latency_ms, every["fault"] == 0, np.asarray(tokens)[every["kind"]])

    def figures(self, seconds: float, good_ms: float) -> dict[str, float]:
        """Figures for tables. An answer above `good_ms` is not good; a percentile of nothing is left out."""
        shortest = np.quantile(self.tokens, 1 / 3) if len(self.tokens) else 0
        counts = {
            "offered": len(self.answered),
            "answered": self.answered.sum(),
            "good": (self.answered & (self.latency_ms <= good_ms)).sum(),
        }
        found = {f"{name}_per_s": int(count) / seconds for name, count in counts.items()}
        for name, chosen, percent in (
            ("p50_ms", self.answered, 50),
            ("p99_ms", self.answered, 99),
            ("short_p99_ms", self.answered & (self.tokens <= shortest), 99),
        ):
            if chosen.any():
                found[name] = float(np.percentile(self.latency_ms[chosen], percent, method="inverted_cdf"))
        return found


def closed_loop(
    place: tuple[str, int, str], hidden_size: int, texts: Sequence[Any], connections: int, seconds: float
) -> float:
    """Texts per second of so many connections in a closed loop, after a short warm-up.

    `place` holds the form of the requests, the port and the endpoint.
    """
    form, port, endpoint = place
    with Child("bertserve.loadtest.generator.client") as client:
        opened: dict[str, Any] = {"form": form, "port": port, "endpoint": endpoint, "texts": {0: texts}}
        client.ask("open", way="loop", hidden_size=hidden_size, **opened)
        asked = {"way": "loop", "connections": connections, "tokens": 0}
        sample = client.ask("measure", _ASK_S + seconds, warm_up_s=_WARM_UP_S, seconds=seconds, **asked)
    return float(sample["per_s"])


def drive(
    target: Target,
    workload: Workload,
    phases: Sequence[Phase],
    rate: float,
    seed: int,
    patience_s: float = _PATIENCE_S,
) -> Requests:
    """Sends a schedule; raises BenchError if the generator failed."""
    scenario = Scenario("benchmark", "", tuple(phases), {1: 1.0})
    recorded = Recorded({}, scenario.seconds)
    run(target, Load(scenario, rate, workload.kinds, seed, patience_s), recorded, lambda *_: None)
    return Requests.of(recorded, workload.tokens)


def block(
    target: Target,
    workload: Workload,
    seconds: float,
    rate: float,
    seed: int,
    *,
    good_ms: float = SLO_MS,
    patience_s: float = _PATIENCE_S,
) -> dict[str, float]:
    """Figures of an open-loop measurement."""
    requests = drive(target, workload, even(seconds), rate, seed, patience_s)
    return {**requests.figures(seconds, good_ms), "rate": rate}
