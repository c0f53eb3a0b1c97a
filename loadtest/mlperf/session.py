"""One server and its samples: starts LoadGen runs, each in its own process, and collects their results."""

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
"""The deadline of every request. LoadGen has no rejected requests, so lateness must show as latency."""

_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Load:
    """Parameters of the performance runs.

    Attributes:
        rate: Server's queries per second.
        seconds: Minimum duration.
        latency_ms: Limit of Server's 99th percentile; 0: the benchmark's own.
    """

    rate: float
    seconds: float
    latency_ms: float = 0.0


@dataclass(frozen=True)
class Runs:
    """The results of a scenario's runs.

    Attributes:
        seconds: Minimum duration of the performance run.
        verdict: Result of the performance run; None without one.
        accuracy: Result of the accuracy run; None without one.
        caches: Whether the server consulted its response cache; None: not reported.
    """

    seconds: float
    verdict: Verdict | None = None
    accuracy: Accuracy | None = None
    caches: bool | None = None

    @property
    def passed(self) -> bool:
        """Whether the runs are valid by LoadGen and pass the accuracy gate."""
        valid = self.verdict is None or (self.verdict.valid and not self.verdict.errors)
        return valid and (self.accuracy is None or self.accuracy.held)

    @property
    def breaches(self) -> list[str]:
        """Why the performance run is not compliant, regardless of its figures.

        https://github.com/mlcommons/inference_policies, inference_rules.adoc.
        """
        found = []
        if self.seconds < FULL_S:
            found.append(f"MLPerf requires at least {FULL_S:g} s")
        if self.caches:
            found.append(
                "the response cache is on, and MLPerf forbids it; start the server without --response-cache-mb"
            )
        return found


@dataclass(frozen=True)
class Session:
    """A server under measurement.

    Attributes:
        conversation: Requests and replies of the server.
        data: File with the samples; None: the built-in ones.
        precision: Data type of the model's artifact, as the server reports it.
        out: Parent directory of LoadGen's settings and logs, one directory per scenario and mode.
        fp32: Answers of the same model in fp32 to all samples; None: accuracy is not measured.
    """

    conversation: Conversation
    data: Path | None
    precision: str
    out: Path
    fp32: Sequence[bytes] | None = None

    @classmethod
    def open(cls, target: Target, model: str, data: Path | None, out: Path) -> Session:
        """Discovers the server's model and reads the samples.

        Args:
            target: The server.
            model: Model name; empty: the server's only model with a supported task.
            data: See `data`.
            out: See `out`.

        Raises:
            BenchError: The server is unreachable or has no such model, or the samples cannot be read.
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
        return self.conversation.library

    def beside(self, reference: Target) -> Session:
        """Returns a copy with the answers of a reference server of the same model in fp32.

        Raises:
            BenchError: The reference does not answer, or does not compute in fp32.
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
            modes: From `run.MODES`.
            load: Parameters of the performance runs.

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
        """Runs LoadGen once; returns the directory of its settings and logs, cleared of older files."""
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
    """The target of a URL, over the Open Inference Protocol.

    Raises:
        BenchError: The URL is invalid, or uses TLS.
    """
    target = dataclasses.replace(Target.of(url, "v2", "", api_key()), timeout_ms=_TIMEOUT_MS)
    if target.tls is not None:
        raise BenchError(f"{target.url}: the LoadGen client does not support TLS; use http://host:port")
    return target
