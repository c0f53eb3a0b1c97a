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
from loadtest.mlperf.library import TASKS, Conversation, Library
from loadtest.mlperf.scenarios import FULL_S, SCENARIOS, user_conf
from loadtest.mlperf.verdict import read_verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loadtest.mlperf.accuracy import Accuracy
    from loadtest.mlperf.verdict import Verdict

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
class Runs:
    """What came of a scenario's runs.

    Attributes:
        seconds: The least duration of the performance run.
        verdict: Of the performance run; None: there was none.
        accuracy: Of the accuracy run; None: there was none.
        caches: Whether the server took answers from a cache, or kept them in one; None: it does not tell.
    """

    seconds: float
    verdict: Verdict | None = None
    accuracy: Accuracy | None = None
    caches: bool | None = None

    @property
    def passed(self) -> bool:
        """Whether LoadGen and the gate are content with what was run."""
        valid = self.verdict is None or (self.verdict.valid and not self.verdict.errors)
        return valid and (self.accuracy is None or self.accuracy.held)

    @property
    def breaches(self) -> list[str]:
        """Why the performance run is not compliant, whatever its figures.

        https://github.com/mlcommons/inference_policies, inference_rules.adoc.
        """
        found = []
        if self.seconds < FULL_S:
            found.append(f"the rules ask for {FULL_S:g} s")
        if self.caches:
            found.append("the server keeps answers, and the rules forbid it: start it without --response-cache-mb")
        return found


@dataclass(frozen=True)
class Session:
    """A server that is measured.

    Attributes:
        conversation: With it.
        data: The file of the samples; None: the built-in ones.
        precision: What the model's artifact computes in, as the server says.
        out: Where LoadGen's settings and logs go, in a folder for each scenario and mode.
        fp32: What the same model in fp32 answers to every sample; None: accuracy is not measured.
    """

    conversation: Conversation
    data: Path | None
    precision: str
    out: Path
    fp32: Sequence[bytes] | None = None

    @classmethod
    def open(cls, target: Target, model: str, data: Path | None, out: Path) -> Session:
        """Asks the server what it has.

        Args:
            target: The server.
            model: The one to ask; empty: its only one with a task that is known here.
            data: See `data`.
            out: See `out`.

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
        return cls(Conversation(target, Library.read(one.task, data)), data, precision_of(target), out)

    @property
    def model(self) -> str:
        return self.conversation.target.model

    @property
    def library(self) -> Library:
        """The samples."""
        return self.conversation.library

    def beside(self, reference: Target) -> Session:
        """The same with the answers of a server of the same model in fp32.

        Raises:
            BenchError: It does not answer, or computes in something else.
        """
        target = dataclasses.replace(reference, model=self.model)
        if (precision := precision_of(target)) not in {"float32", ""}:
            raise BenchError(
                f"--reference {target.url}: {target.model} is {precision} there; start it with --precision fp32"
            )
        return dataclasses.replace(self, fp32=accuracy.reference(Conversation(target, self.library)))

    def run(self, scenario: str, modes: Sequence[str], load: Load) -> Runs:
        """Runs a scenario in each mode.

        Args:
            scenario: One of `scenarios.SCENARIOS`.
            modes: Of `run.MODES`.
            load: What the performance runs are told.

        Raises:
            BenchError: Nothing could be measured.
        """
        looked_up = cached_of(self.conversation.target)
        conf = user_conf(SCENARIOS[scenario], self.conversation, load.rate, load.seconds, load.latency_ms)
        logs = {mode: self._ask(scenario, mode, conf, load) for mode in modes}
        verdict = judged = None
        if "performance" in logs:
            verdict = read_verdict(logs["performance"] / "mlperf_log_summary.txt")
        if self.fp32 is not None and "accuracy" in logs:
            answers = accuracy.read_log(logs["accuracy"] / "mlperf_log_accuracy.json", len(self.library.samples))
            judged = accuracy.judge(self.library, answers, self.fp32)
        caches = None if looked_up is None else cached_of(self.conversation.target) != looked_up
        return Runs(load.seconds, verdict, judged, caches)

    def _ask(self, scenario: str, mode: str, conf: str, load: Load) -> Path:
        """Runs LoadGen once; returns the folder of its settings and logs, in which nothing older is left."""
        folder = self.out / scenario / mode
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("*"):
                old.unlink()
            (folder / "user.conf").write_text(conf, encoding="utf-8")
        except OSError as error:
            raise BenchError(f"--out {self.out}: {error}") from error
        with Child("loadtest.mlperf.run") as child:
            child.ask(
                "run",
                _LIMIT_S + 2 * load.seconds,
                target=dataclasses.asdict(self.conversation.target),
                task=self.library.task,
                data=str(self.data) if self.data else None,
                scenario=scenario,
                mode=mode,
                conf=str(folder / "user.conf"),
                out=str(folder),
            )
        return folder


def target_of(url: str) -> Target:
    """The server that a URL names, asked over the Open Inference Protocol.

    Raises:
        BenchError: It is no such URL, or one of TLS.
    """
    target = dataclasses.replace(Target.of(url, "v2", "", api_key()), timeout_ms=_TIMEOUT_MS)
    if target.tls is not None:
        raise BenchError(f"{target.url}: LoadGen asks without TLS; name it as http://host:port")
    return target
