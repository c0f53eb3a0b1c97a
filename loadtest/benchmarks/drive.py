"""Loads of the benchmarks: an open loop of real texts of known lengths against one server, and a closed loop."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from loadtest.generator.arrivals import choices, schedule
from loadtest.generator.child import Child
from loadtest.generator.run import Kind, Load, run
from loadtest.generator.scenario import Phase, Scenario
from loadtest.generator.workload import sentence_words
from loadtest.report.result import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadtest.generator.messages import Target
    from loadtest.generator.workload import Bundle

SLO_MS = 250.0
"""A later answer is not good."""

_TEXTS, _MIN_WORDS, _MAX_WORDS = 200, 6, 250
_PATIENCE_S = 10.0
_WARM_UP_S, _ASK_S, _LOOK_S = 0.5, 60.0, 0.05
_REFUSED, _MISSED = ("429 ", "503 "), ("504 ",)


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

    def requests(self, phases: Sequence[Phase], rate: float, seed: int) -> list[tuple[float, int]]:
        """Seconds and tokens of every request that a run with these arguments sends."""
        times = schedule(Scenario("benchmark", "", tuple(phases), {1: 1.0}), rate, seed)
        drawn = choices([kind.weight for kind in self.kinds], len(times), seed)
        return [(at, self.tokens[kind]) for at, kind in zip(times.tolist(), drawn.tolist(), strict=True)]


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
    """A result that keeps every request, in pieces as the generators report them.

    `reasons` maps the numbers in the `fault` field of a piece's records to reasons of failure.
    """

    records: list[NDArray[np.void]] = field(default_factory=list)
    reasons: list[list[str]] = field(default_factory=list)

    def take(self, records: NDArray[np.void], faults: Sequence[str], kinds: Sequence[str]) -> None:
        """Keeps the records in addition to summing them up."""
        Result.take(self, records, faults, kinds)  # a class with slots has lost what `super()` looks for
        self.records.append(records)
        self.reasons.append(list(faults))

    def failed_with(self, statuses: tuple[str, ...]) -> NDArray[np.bool_]:
        """Marks the requests that failed for a reason that begins with one of these."""
        pieces = zip(self.records, self.reasons, strict=True)
        found = [np.array([reason.startswith(statuses) for reason in told])[piece["fault"]] for piece, told in pieces]
        return np.concatenate(found)


@dataclass(slots=True, frozen=True)
class Requests:
    """Outcomes of a run's requests, in arrays of equal length.

    Attributes:
        intended: Scheduled send time, in seconds from the start.
        latency_ms: Time from `intended` to the answer or the refusal.
        answered: Whether the request has an answer.
        refused: Whether the server refused the request on arrival.
        missed: Whether the server accepted the request and its deadline passed.
        tokens: Tokens of the text.
        queue_us: As the server reports it, like `compute_us`; -1 if it does not.
    """

    intended: NDArray[np.float64]
    latency_ms: NDArray[np.float64]
    answered: NDArray[np.bool_]
    refused: NDArray[np.bool_]
    missed: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    queue_us: NDArray[np.float32]
    compute_us: NDArray[np.float32]

    @classmethod
    def of(cls, recorded: Recorded, tokens: Sequence[int]) -> Requests:
        """The requests of a run over texts of these lengths in tokens."""
        every = np.concatenate(recorded.records)
        latency_ms, answered = (every["done"] - every["intended"]) * 1e3, every["fault"] == 0
        fates = (answered, recorded.failed_with(_REFUSED), recorded.failed_with(_MISSED))
        stages = (every["queue_us"], every["compute_us"])
        return cls(every["intended"], latency_ms, *fates, np.asarray(tokens)[every["kind"]], *stages)

    def figures(self, seconds: float, good_ms: float) -> dict[str, float]:
        """Figures for tables. An answer above `good_ms` is not good; a percentile of nothing is left out."""
        low, high = np.quantile(self.tokens, (1 / 3, 2 / 3)) if len(self.tokens) else (0, 0)
        answered = self.answered
        counted = {
            "offered": np.ones_like(answered),
            "answered": answered,
            "good": answered & (self.latency_ms <= good_ms),
            "refused": self.refused,
            "missed": self.missed,
        }
        found = {f"{name}_per_s": int(chosen.sum()) / seconds for name, chosen in counted.items()}
        found["failed_otherwise"] = float((~answered & ~self.refused & ~self.missed).sum())
        for name, chosen, percent in (
            ("p50_ms", answered, 50),
            ("p99_ms", answered, 99),
            ("short_p99_ms", answered & (self.tokens <= low), 99),
            ("long_p99_ms", answered & (self.tokens >= high), 99),
            ("refusal_p99_ms", self.refused, 99),
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
    with Child("loadtest.generator.client") as client:
        opened: dict[str, Any] = {"form": form, "port": port, "endpoint": endpoint, "texts": {0: texts}}
        client.ask("open", way="loop", hidden_size=hidden_size, **opened)
        asked = {"way": "loop", "connections": connections, "tokens": 0}
        sample = client.ask("measure", _ASK_S + seconds, warm_up_s=_WARM_UP_S, seconds=seconds, **asked)
    return float(sample["per_s"])


class Running:
    """A load that a thread of its own sends while the caller acts on the server.

    A request without an answer after `patience_s` has failed. `generator` is the module that sends.
    """

    def __init__(
        self,
        target: Target,
        kinds: Sequence[Kind],
        phases: Sequence[Phase],
        rate: float,
        seed: int,
        *,
        patience_s: float = _PATIENCE_S,
        generator: str = "loadtest.generator.open_loop",
    ) -> None:
        scenario = Scenario("benchmark", "", tuple(phases), {1: 1.0})
        load = Load(scenario, rate, tuple(kinds), seed, patience_s)
        self.processes = load.processes
        self.result = Recorded({}, scenario.seconds)
        self._began: float | None = None
        pool = ThreadPoolExecutor(1)
        self._sent = pool.submit(run, target, load, self.result, self._show, generator)
        pool.shutdown(wait=False)

    def began(self) -> float:
        """Start of the schedule on the clock `time.perf_counter`; waits for it."""
        while self._began is None:
            self.check()
            time.sleep(_LOOK_S)
        return self._began

    def check(self) -> None:
        """Raises BenchError if a generator has failed."""
        if self._sent.done():
            self._sent.result()

    def join(self) -> Recorded:
        """Waits for the last answer; raises BenchError if a generator has failed."""
        self._sent.result()
        return self.result

    def _show(self, _: Result, passed_s: float) -> None:
        if self._began is None:
            self._began = time.perf_counter() - passed_s


def drive(
    target: Target,
    workload: Workload,
    phases: Sequence[Phase],
    rate: float,
    seed: int,
    patience_s: float = _PATIENCE_S,
) -> tuple[Requests, Any]:
    """Sends a schedule; returns its requests and the generator's facts. Raises BenchError if the generator failed."""
    recorded = Running(target, workload.kinds, phases, rate, seed, patience_s=patience_s).join()
    return Requests.of(recorded, workload.tokens), recorded.generator


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
    requests, generator = drive(target, workload, even(seconds), rate, seed, patience_s)
    found = requests.figures(seconds, good_ms)
    return found | {"rate": rate, "generator_late_p99_ms": generator.lateness.percentile_ms(99)}
