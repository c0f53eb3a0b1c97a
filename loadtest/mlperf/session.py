"""One server and its samples: runs of LoadGen, each in a process of its own, and what came of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.discovery import cached_of, models_of, precision_of
from loadtest.generator.messages import Target, api_key
from loadtest.mlperf import accuracy
from loadtest.mlperf.compliance import TEST, verify
from loadtest.mlperf.library import TASKS, Conversation, Library
from loadtest.mlperf.scenarios import SCENARIOS, user_conf
from loadtest.mlperf.submission import Rules, Submission
from loadtest.mlperf.verdict import read_detail, read_verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loadtest.mlperf.compliance import Compliance
    from loadtest.mlperf.verdict import Log, Verdict

_TIMEOUT_MS = 30_000
"""The deadline of every request: LoadGen knows no refusal, so that lateness must show as latency."""

_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Load:
    """What the performance runs are told.

    Attributes:
        rate: Queries a second of Server.
        seconds: The least duration.
        latency_ms: Server's bound for its 99th percentile; 0: the benchmark's own.
    """

    rate: float
    seconds: float
    latency_ms: float = 0.0


@dataclass(frozen=True)
class Session:
    """A server that is measured.

    Attributes:
        conversation: With it.
        data: The file of the samples; None: the built-in ones.
        submission: Where results go.
        fp32: What the same model in fp32 answers to every sample; None: accuracy is not measured.
    """

    conversation: Conversation
    data: Path | None
    submission: Submission
    fp32: Sequence[bytes] | None = None

    @classmethod
    def open(cls, target: Target, model: str, data: Path | None, out: Path) -> Session:
        """Asks the server what it has.

        Args:
            target: The server.
            model: The one to ask; empty: its only one with a task that is known here.
            data: See `data`.
            out: The root of the results.

        Raises:
            BenchError: It is not there, has no such model, or the samples cannot be read.
        """
        found = [one for one in models_of(target, model) if one.task in TASKS]
        if len(found) != 1:
            known = ", ".join(f"{one.name} ({one.task})" for one in found) or "none"
            wanted = " or ".join(TASKS)
            raise BenchError(f"{target.authority} must have one model for {wanted}, or --model; it has {known}")
        [one] = found
        target = dataclasses.replace(target, model=one.name)
        submission = Submission(out, one.name, precision_of(target))
        session = cls(Conversation(target, Library.read(one.task, data)), data, submission)
        submission.describe(session.library)
        return session

    @property
    def library(self) -> Library:
        """The samples."""
        return self.conversation.library

    def beside(self, reference: Target) -> Session:
        """The same with the answers of a server of the same model in fp32.

        Raises:
            BenchError: It does not answer, or computes in something else.
        """
        target = dataclasses.replace(reference, model=self.conversation.target.model)
        if (precision := precision_of(target)) not in {"float32", ""}:
            raise BenchError(
                f"--reference {target.url}: {target.model} is {precision} there; start it with --precision fp32"
            )
        return dataclasses.replace(self, fp32=accuracy.reference(Conversation(target, self.library)))

    def run(self, scenario: str, modes: Sequence[str], load: Load, *, test: bool = False) -> Rules:
        """Runs a scenario in each mode and writes its results.

        Args:
            scenario: One of `scenarios.SCENARIOS`.
            modes: Of `run.MODES`.
            load: What the performance runs are told.
            test: Whether to run the compliance test behind both modes.

        Raises:
            BenchError: Nothing could be measured.
        """
        looked_up = cached_of(self.conversation.target)
        conf = user_conf(SCENARIOS[scenario], self.conversation, load.rate, load.seconds, load.latency_ms)
        for mode in modes:
            self._ask(scenario, mode, conf, load)
        verdict = log = judged = tested = None
        if "performance" in modes:
            verdict, log = self._performance(scenario)
        if self.fp32 is not None and "accuracy" in modes:
            judged = accuracy.judge(self.library, self._answers(scenario), self.fp32)
            if test:
                tested = self._tested(scenario, conf, load, self.fp32)
        caches = None if looked_up is None else cached_of(self.conversation.target) != looked_up
        rules = Rules(self.library, verdict, log, judged, tested, caches)
        self.submission.conclude(scenario, rules)
        return rules

    def _ask(self, scenario: str, mode: str, conf: str, load: Load, audit: Path | None = None) -> None:
        """Runs LoadGen once; it leaves its logs in the folder of the mode."""
        with Child("loadtest.mlperf.run") as child:
            child.ask(
                "run",
                _LIMIT_S + 2 * load.seconds,
                target=dataclasses.asdict(self.conversation.target),
                task=self.library.task,
                data=str(self.data) if self.data else None,
                scenario=scenario,
                mode=mode if audit is None else "performance",
                conf=str(self.submission.begin(scenario, mode, conf)),
                out=str(self.submission.logs(scenario, mode)),
                audit=str(audit) if audit else None,
            )

    def _performance(self, scenario: str, mode: str = "performance") -> tuple[Verdict, Log]:
        """What LoadGen says of a performance run, or of the compliance test's."""
        logs = self.submission.logs(scenario, mode)
        return read_verdict(logs / "mlperf_log_summary.txt"), read_detail(logs / "mlperf_log_detail.txt")

    def _answers(self, scenario: str) -> list[bytes]:
        """The accuracy run's, by sample."""
        log = self.submission.logs(scenario, "accuracy") / "mlperf_log_accuracy.json"
        return accuracy.read_log(log, len(self.library.samples))

    def _tested(self, scenario: str, conf: str, load: Load, fp32: Sequence[bytes]) -> Compliance:
        """Runs the compliance test behind the runs that it repeats."""
        self._ask(scenario, TEST, conf, load, self.submission.audit(scenario))
        logged = accuracy.read_entries(self.submission.move_sampled(scenario), len(self.library.samples))
        runs = self._performance(scenario), self._performance(scenario, TEST)
        return verify(self.library, fp32, self._answers(scenario), logged, runs)


def target_of(url: str) -> Target:
    """The server that a URL names, asked over the Open Inference Protocol.

    Raises:
        BenchError: It is no such URL, or one of TLS.
    """
    target = dataclasses.replace(Target.of(url, "v2", "", api_key()), timeout_ms=_TIMEOUT_MS)
    if target.tls is not None:
        raise BenchError(f"{target.url}: LoadGen asks without TLS; name it as http://host:port")
    return target
