"""One server and its samples: runs of LoadGen, each in a process of its own, and what came of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.discovery import models_of, precision_of
from loadtest.generator.messages import Target, api_key
from loadtest.mlperf import accuracy
from loadtest.mlperf.library import TASKS, Conversation, Library
from loadtest.mlperf.scenarios import SCENARIOS, user_conf
from loadtest.mlperf.submission import Rules, Submission
from loadtest.mlperf.verdict import read_verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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

    def run(self, scenario: str, modes: Sequence[str], load: Load) -> Rules:
        """Runs a scenario in each mode and writes its results.

        Raises:
            BenchError: Nothing could be measured.
        """
        conf = user_conf(SCENARIOS[scenario], self.conversation, load.rate, load.seconds, load.latency_ms)
        for mode in modes:
            with Child("loadtest.mlperf.run") as child:
                child.ask(
                    "run",
                    _LIMIT_S + 2 * load.seconds,
                    target=dataclasses.asdict(self.conversation.target),
                    task=self.library.task,
                    data=str(self.data) if self.data else None,
                    scenario=scenario,
                    mode=mode,
                    conf=str(self.submission.begin(scenario, mode, conf)),
                    out=str(self.submission.logs(scenario, mode)),
                )
        verdict = judged = None
        if "performance" in modes:
            verdict = read_verdict(self.submission.logs(scenario, "performance") / "mlperf_log_summary.txt")
        if self.fp32 is not None and "accuracy" in modes:
            log = self.submission.logs(scenario, "accuracy") / "mlperf_log_accuracy.json"
            judged = accuracy.judge(self.library, accuracy.read_log(log, len(self.library.samples)), self.fp32)
        rules = Rules(load.seconds, verdict, judged)
        self.submission.conclude(scenario, self.library, rules)
        return rules


def target_of(url: str) -> Target:
    """The server that a URL names, asked over the Open Inference Protocol.

    Raises:
        BenchError: It is no such URL, or one of TLS.
    """
    target = dataclasses.replace(Target.of(url, "v2", "", api_key()), timeout_ms=_TIMEOUT_MS)
    if target.tls is not None:
        raise BenchError(f"{target.url}: LoadGen asks without TLS; name it as http://host:port")
    return target
