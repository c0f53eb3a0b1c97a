"""The result of a run: counts and histograms, in total, over time and by kind of request."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bertserve.loadtest.errors import NEVER_SENT, BenchError
from bertserve.loadtest.report.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FORMAT = "bertserve-load-1"
LATE_S = 0.001
"""If the generator gets to a request later than this, the generator caused the delay, not the server."""

_TAIL_PERCENT = 99.0

_MAX_SLICES = 120
MIN_SLICE_S = 0.25

STAGES = ("waiting to be sent", "network and transport", "tokenize", "queue", "compute", "other work of the server")
"""Stages of a request. The client measures the first two; the server reports the others."""


@dataclass(slots=True)
class Slice:
    """A slice of a run; a request belongs to the slice of its scheduled send time.

    Attributes:
        offered: Scheduled requests.
        failed: Requests that were sent and got no answer.
        unsent: Requests that were never sent, because the generator had no free connection.
        latency: Latencies of answered requests, from the scheduled send time.
    """

    offered: int = 0
    failed: int = 0
    unsent: int = 0
    latency: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class GeneratorFacts:
    """Measurements of the generator itself, which tell whether to trust a run.

    Attributes:
        processes: Number of generator processes.
        late: Requests that the generator got to more than `LATE_S` after their scheduled time.
        lateness: Delay until the generator got to each request; excludes waiting for a free connection.
        prompt: Latencies as they would be if the generator had got to every request on time.
        null: Latencies of the same generator against a no-op server.
        null_late: Late requests in that measurement.
        cpu_us: CPU time of the generators per request.
    """

    processes: int = 1
    late: int = 0
    lateness: Histogram = field(default_factory=Histogram)
    prompt: Histogram = field(default_factory=Histogram)
    null: Histogram = field(default_factory=Histogram)
    null_late: int = 0
    cpu_us: float = 0.0


@dataclass(slots=True)
class Result:
    """One run.

    Attributes:
        facts: Target, load, date and machine, as text.
        seconds: Length of the schedule.
        good_limit_ms: Later answers do not count as goodput; None: every answer counts.
        slices: The run over time, in slices of equal length.
        stages: Histograms by the names of `STAGES`, as far as the server reports them.
        kinds: Latencies by kind of request.
        faults: Failed requests by reason.
        generator: Measurements of the generator itself.
    """

    facts: dict[str, str]
    seconds: float
    good_limit_ms: float | None = None
    slices: list[Slice] = field(default_factory=list)
    stages: dict[str, Histogram] = field(default_factory=dict)
    kinds: dict[str, Histogram] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    generator: GeneratorFacts = field(default_factory=GeneratorFacts)
    latency: Histogram = field(default_factory=Histogram)

    def __post_init__(self) -> None:
        """Creates empty slices for a new run."""
        if not self.slices:
            count = max(1, min(_MAX_SLICES, int(self.seconds / MIN_SLICE_S)))
            self.slices = [Slice() for _ in range(count)]

    @property
    def slice_s(self) -> float:
        return self.seconds / len(self.slices)

    @property
    def offered(self) -> int:
        return sum(part.offered for part in self.slices)

    @property
    def failed(self) -> int:
        return sum(part.failed for part in self.slices)

    @property
    def unsent(self) -> int:
        return sum(part.unsent for part in self.slices)

    @property
    def failed_percent(self) -> float:
        """Percentage of sent requests without an answer."""
        return 100 * self.failed / max(1, self.offered - self.unsent)

    @property
    def offered_per_s(self) -> float:
        return self.offered / self.seconds

    @property
    def answered_per_s(self) -> float:
        """Throughput."""
        return len(self.latency) / self.seconds

    @property
    def good_per_s(self) -> float:
        """Goodput: answers within the limit."""
        return sum(self.good(part) for part in self.slices) / self.seconds

    @property
    def generator_was_the_limit(self) -> bool:
        """Whether the tail latency comes from the generator, or it could not send every request."""
        # Written with `not ... <=` because the p99 is NaN if nothing was answered.
        added_ms, latency_ms = self.generator_added_ms, self.latency.percentile_ms(_TAIL_PERCENT)
        return self.unsent > 0 or (added_ms > 1e3 * LATE_S and not added_ms <= latency_ms / 10)

    @property
    def generator_added_ms(self) -> float:
        """The generator's contribution to the p99; if unknown, the p99 of its lateness."""
        prompt = self.generator.prompt
        if not len(prompt):
            return self.generator.lateness.percentile_ms(_TAIL_PERCENT)
        return self.latency.percentile_ms(_TAIL_PERCENT) - prompt.percentile_ms(_TAIL_PERCENT)

    def good(self, part: Slice) -> int:
        """Answers of a slice within the limit."""
        return len(part.latency) if self.good_limit_ms is None else part.latency.within(self.good_limit_ms)

    def take(self, records: NDArray[np.void], faults: Sequence[str], kinds: Sequence[str]) -> None:
        """Adds records of a generator.

        Args:
            records: Array of type `records.RECORD`.
            faults: Table of faults.
            kinds: Names of the kinds.
        """
        indices = np.minimum((records["intended"] / self.slice_s).astype(int), len(self.slices) - 1)
        never = np.array([fault.startswith(NEVER_SENT) for fault in faults])[records["fault"]]
        for index, failed, unsent in zip(
            indices.tolist(), ((records["fault"] > 0) & ~never).tolist(), never.tolist(), strict=True
        ):
            self.slices[index].offered += 1
            self.slices[index].failed += failed
            self.slices[index].unsent += unsent
        self.faults.update(faults[index] for index in records["fault"].tolist() if index)
        late = records["due"] - records["intended"]
        self.generator.lateness.record(late.tolist())
        self.generator.late += int((late > LATE_S).sum())
        answered = records[records["fault"] == 0]
        taken = (answered["done"] - answered["intended"]).tolist()
        self.latency.record(taken)
        self.generator.prompt.record((answered["done"] - answered["due"]).tolist())
        for index, kind, latency in zip(
            indices[records["fault"] == 0].tolist(), answered["kind"].tolist(), taken, strict=True
        ):
            self.slices[index].latency.record((latency,))
            self.kinds.setdefault(kinds[kind], Histogram()).record((latency,))
        self._take_stages(answered)

    def _take_stages(self, answered: NDArray[np.void]) -> None:
        told = answered[answered["total_us"] >= 0]
        if not len(told):
            return
        stages = {name: told[f"{name}_us"] / 1e6 for name in ("tokenize", "queue", "compute", "total")}
        total = stages.pop("total")
        seen = {
            "waiting to be sent": told["sent"] - told["intended"],
            "network and transport": told["done"] - told["sent"] - total,
            **stages,
            "other work of the server": total - sum(np.maximum(stage, 0) for stage in stages.values()),
        }
        for name in STAGES:
            self.stages.setdefault(name, Histogram()).record(np.maximum(seen[name], 0).tolist())

    def as_json(self) -> dict[str, Any]:
        """The run as plain JSON values; histograms in their standard encoded form, in microseconds."""
        return {
            "format": FORMAT,
            "facts": self.facts,
            "seconds": self.seconds,
            "good_limit_ms": self.good_limit_ms,
            "offered_per_s": self.offered_per_s,
            "answered_per_s": self.answered_per_s,
            "good_per_s": self.good_per_s,
            "percentiles_ms": {f"p{p:g}": self.latency.percentile_ms(p) for p in (50, 90, 99, 99.9)}
            if len(self.latency)
            else {},
            "faults": dict(self.faults),
            "generator": {
                **{f.name: getattr(self.generator, f.name) for f in dataclasses.fields(GeneratorFacts)},
                "lateness": self.generator.lateness.encoded(),
                "prompt": self.generator.prompt.encoded(),
                "null": self.generator.null.encoded(),
            },
            "latency": self.latency.encoded(),
            "stages": {name: histogram.encoded() for name, histogram in self.stages.items()},
            "kinds": {name: histogram.encoded() for name, histogram in self.kinds.items()},
            "slices": [
                {
                    "offered": part.offered,
                    "failed": part.failed,
                    "unsent": part.unsent,
                    "latency": part.latency.encoded(),
                }
                for part in self.slices
            ],
        }

    @classmethod
    def read(cls, file: Path) -> Result:
        """Reads a run from its JSON file.

        Raises:
            BenchError: The file is not a report; the message is one line.
        """
        try:
            values = json.loads(file.read_bytes())
            if values["format"] != FORMAT:
                raise BenchError(f"{file}: unsupported format {values['format']!r}; supported: {FORMAT!r}")
            return cls._of(values)
        except OSError as error:
            raise BenchError(f"{file}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{file} is not a report of `bertserve load` ({type(error).__name__}: {error})") from error

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Result:
        told = dict(values["generator"])
        told |= {name: Histogram.decoded(told[name]) for name in ("lateness", "prompt", "null") if name in told}
        return cls(
            facts=values["facts"],
            seconds=values["seconds"],
            good_limit_ms=values["good_limit_ms"],
            slices=[
                Slice(part["offered"], part["failed"], part.get("unsent", 0), Histogram.decoded(part["latency"]))
                for part in values["slices"]
            ],
            stages={name: Histogram.decoded(text) for name, text in values["stages"].items()},
            kinds={name: Histogram.decoded(text) for name, text in values["kinds"].items()},
            faults=Counter(values["faults"]),
            generator=GeneratorFacts(**told),
            latency=Histogram.decoded(values["latency"]),
        )
