"""Everything one run of the benchmark found out, and the arithmetic between its rounds.

Subjects are compared within a round, where both met the same state of the machine, and the medians of these
comparisons are taken: a difference of two medians would mix rounds. A measurement during which others used the
machine counts only where there is no quiet one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.server.subjects import OPTIONS, PROTOCOLS, WIDE, is_raw, raw_subject, server_subject
from loadtest.report.sample import Spread

if TYPE_CHECKING:
    from loadtest.report.sample import Sample

HTTP_OVER_RAW_MS = 0.45
GRPC_OVER_RAW_MS = 0.65
LATENCY_TOKENS = 8
THROUGHPUT_TOKENS = 128
THROUGHPUT_CONNECTIONS = 32
LEAST_PERCENT_OF_RAW = 85
MEMORY_MB = 500
READY_S = 10


class Samples:
    """The samples of every subject, by the length of the texts; each subject has one of each round."""

    def __init__(self) -> None:
        """Starts empty."""
        self.by_tokens: dict[int, dict[str, list[Sample]]] = {}

    def add(self, tokens: int, subject: str, sample: Sample) -> None:
        """Adds the next round's sample."""
        self.by_tokens.setdefault(tokens, {}).setdefault(subject, []).append(sample)

    def spread(self, tokens: int, subject: str, figure: str) -> Spread:
        """A figure (the name of a field of `Sample`) over the rounds."""
        samples = self.by_tokens[tokens][subject]
        quiet = [sample for sample in samples if sample.quiet]
        return Spread.of([getattr(sample, figure) for sample in quiet or samples])

    def fastest_raw(self, tokens: int) -> str:
        """The raw engine with the least median latency: the wide session, with the better options."""
        subjects = [raw_subject(WIDE, options) for options in OPTIONS]
        return min(subjects, key=lambda subject: self.spread(tokens, subject, "p50_ms").median)

    def busiest_raw(self, tokens: int) -> str:
        """The raw engine that brings most texts through, whatever way it goes."""
        subjects = [subject for subject in self.by_tokens[tokens] if is_raw(subject)]
        return max(subjects, key=lambda subject: self.spread(tokens, subject, "per_s").median)

    def over_raw_ms(self, tokens: int, subject: str) -> Spread:
        """How much a subject's median latency lies above the fastest raw engine's of the same round."""
        pairs = self._pairs(tokens, subject, self.fastest_raw(tokens))
        return Spread.of([own.p50_ms - raw.p50_ms for own, raw in pairs])

    def percent_of_raw(self, tokens: int, subject: str) -> Spread:
        """A subject's throughput in percent of the busiest raw engine's of the same round."""
        pairs = self._pairs(tokens, subject, self.busiest_raw(tokens))
        return Spread.of([100 * own.per_s / raw.per_s for own, raw in pairs])

    def every(self) -> list[Sample]:
        """All samples of all subjects."""
        return [s for subjects in self.by_tokens.values() for group in subjects.values() for s in group]

    def _pairs(self, tokens: int, own: str, raw: str) -> list[tuple[Sample, Sample]]:
        subjects = self.by_tokens[tokens]
        pairs = list(zip(subjects[own], subjects[raw], strict=True))
        return [(one, base) for one, base in pairs if one.quiet and base.quiet] or pairs


@dataclass(slots=True, frozen=True)
class Target:
    """A figure that the specification asks for.

    Attributes:
        what: The figure.
        limit: What is asked, in words.
        found: What was measured, in words.
        met: Whether it is met; None where it was not measured.
    """

    what: str
    limit: str
    found: str
    met: bool | None


@dataclass(slots=True, frozen=True)
class Report:
    """One run.

    Attributes:
        command: What was typed.
        date: When it ended, ISO 8601 in UTC.
        machine: Facts about the machine.
        model: Name, version and precision of what was served.
        settings: Rounds, seconds and the like.
        samples: Every measurement that counts.
        repeats: Measurements that were made again because others used the machine meanwhile.
        ready_s: Seconds from starting the server to READY.
        server_mb: Resident memory of the server process after the load, in 10^6 bytes.
        engine_mb: The same of its engine process.
        idle_percent: CPU that the idle server used while the raw engine was measured, in percent of one core.
        steal_percent: Share of the cores' time that the machine's host took for itself.
    """

    command: str
    date: str
    machine: dict[str, str]
    model: dict[str, str]
    settings: dict[str, float]
    samples: Samples
    repeats: int
    ready_s: float
    server_mb: float
    engine_mb: float
    idle_percent: float
    steal_percent: float

    def targets(self) -> list[Target]:
        """The specification's targets and whether they are met."""
        memory = self.server_mb + self.engine_mb
        return [
            self._latency_target("HTTP", HTTP_OVER_RAW_MS),
            self._latency_target("gRPC", GRPC_OVER_RAW_MS),
            *(self._throughput_target(protocol) for protocol in PROTOCOLS),
            Target(
                "Resident memory of server and engine after the load",
                f"at most {MEMORY_MB} MB",
                f"{memory:.0f} MB ({self.server_mb:.0f} + {self.engine_mb:.0f})",
                memory <= MEMORY_MB,
            ),
            Target("Start to READY", f"at most {READY_S} s", f"{self.ready_s:.1f} s", self.ready_s <= READY_S),
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values: the summary that the tables show, and each measurement."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "samples"}
        return {
            **plain,
            "targets": [dataclasses.asdict(target) for target in self.targets()],
            "lengths": {str(tokens): self._length(tokens) for tokens in self.samples.by_tokens},
        }

    def _length(self, tokens: int) -> dict[str, Any]:
        samples = self.samples
        return {
            "fastest_raw": samples.fastest_raw(tokens),
            "busiest_raw": samples.busiest_raw(tokens),
            "over_raw_ms": {
                protocol: dataclasses.asdict(samples.over_raw_ms(tokens, server_subject(protocol, 1)))
                for protocol in PROTOCOLS
            },
            "percent_of_raw": {
                subject: dataclasses.asdict(samples.percent_of_raw(tokens, subject))
                for subject in samples.by_tokens[tokens]
                if not is_raw(subject)
            },
            "rounds": {
                subject: [dataclasses.asdict(sample) for sample in group]
                for subject, group in samples.by_tokens[tokens].items()
            },
        }

    def _latency_target(self, protocol: str, limit_ms: float) -> Target:
        what = f"{protocol}, {LATENCY_TOKENS} tokens, 1 connection: p50 above the raw engine's"
        limit = f"at most {limit_ms} ms"
        if LATENCY_TOKENS not in self.samples.by_tokens:
            return Target(what, limit, "not measured", None)
        found = self.samples.over_raw_ms(LATENCY_TOKENS, server_subject(protocol, 1))
        return Target(
            what,
            limit,
            f"{found.median:.2f} ms ({found.low:.2f} to {found.high:.2f}; rounds: {found.rounds})",
            found.median <= limit_ms,
        )

    def _throughput_target(self, protocol: str) -> Target:
        what = (
            f"{protocol}, {THROUGHPUT_TOKENS} tokens, {THROUGHPUT_CONNECTIONS} connections:"
            " throughput, of the raw engine's best"
        )
        limit = f"at least {LEAST_PERCENT_OF_RAW}%"
        if THROUGHPUT_TOKENS not in self.samples.by_tokens:
            return Target(what, limit, "not measured", None)
        found = self.samples.percent_of_raw(THROUGHPUT_TOKENS, server_subject(protocol, THROUGHPUT_CONNECTIONS))
        return Target(
            what,
            limit,
            f"{found.median:.0f}% ({found.low:.0f} to {found.high:.0f}; rounds: {found.rounds})",
            found.median >= LEAST_PERCENT_OF_RAW,
        )
