"""Subjects measured in turns: other load on the machine, costs of each request, results of the rounds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from bertserve.loadtest.benchmarks.processes import cpu_s, descendants, machine_cpu_s
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.report.sample import Sample, Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bertserve.loadtest.benchmarks.server_process import ServerProcess
    from bertserve.loadtest.benchmarks.store import Store
    from bertserve.loadtest.generator.child import Child

Round = dict[str, Sample]
"""The samples of one round, by subject."""

_LONGEST_WARM_UP_S = 0.5
_ASK_S = 120.0
_MAX_REPEATS = 2
_SETTLE_S = 2.0


@dataclass(slots=True, frozen=True)
class Turn:
    """One measurement.

    Attributes:
        subject: Name of its sample.
        child: The process that measures.
        arguments: Arguments of the child's verb `measure`.
        seconds: Length of the measurement.
        server: The server whose CPU time is counted; None if no server answers.
        is_frozen: Whether the server is stopped except during its turns, because it uses CPU while idle.
    """

    subject: str
    child: Child
    arguments: Mapping[str, object]
    seconds: float
    server: ServerProcess | None = None
    is_frozen: bool = False


def measure_round(turns: Sequence[Turn], say: Callable[[str], None]) -> dict[str, Any]:
    """Measures each turn, and repeats those disturbed by others, at most half as many as there are turns.

    Returns:
        The samples by subject: the fields of `Sample` in their order.
    """
    left, samples = len(turns) // 2, {}
    for turn in turns:
        say(turn.subject)
        best = _measure(turn)
        for _ in range(_MAX_REPEATS):
            if best.quiet or not left:
                break
            left -= 1
            best = min(best, _measure(turn), key=lambda sample: sample.others_percent)
        samples[turn.subject] = astuple(best)
    return samples


def _measure(turn: Turn) -> Sample:
    times = {"warm_up_s": min(_LONGEST_WARM_UP_S, turn.seconds / 4), "seconds": turn.seconds}
    with thawed(turn.server if turn.is_frozen else None):
        before, others_before = turn.server.cpu_s() if turn.server else None, _others_cpu_s()
        started = time.perf_counter()
        try:
            fields = turn.child.ask("measure", _ASK_S + turn.seconds, **times, **turn.arguments)
        except BenchError as error:
            said = f"\n\nThe server said last:\n{turn.server.last_words()}" if turn.server else ""
            raise BenchError(f"{turn.subject}: {error}{said}") from error
        passed = time.perf_counter() - started
        after, others = turn.server.cpu_s() if turn.server else None, _others_cpu_s() - others_before
    percent = 100 * max(0.0, others) / passed / (os.cpu_count() or 1)
    sample = replace(Sample(**fields), others_percent=percent)
    if before is None or after is None:
        return sample
    each = 1e6 / sample.exchanges
    return replace(
        sample,
        server_cpu_us=(after.server - before.server) * each,
        engine_cpu_us=(after.engine - before.engine) * each,
        fronts_cpu_us=(after.fronts - before.fronts) * each,
    )


def _others_cpu_s() -> float:
    """CPU time of the whole machine without everything that belongs to this run, in seconds."""
    own = os.getpid()
    return machine_cpu_s() - sum(cpu_s(pid) for pid in [own, *descendants(own)])


@contextlib.contextmanager
def thawed(server: ServerProcess | None) -> Iterator[None]:
    """Lets a stopped server run within this block."""
    if server is None:
        yield
        return
    send_signal(server, signal.SIGCONT)
    try:
        yield
    finally:
        send_signal(server, signal.SIGSTOP)


def send_signal(server: ServerProcess, number: signal.Signals) -> None:
    """Sends a signal to all of its processes."""
    for pid in server.pids():
        os.kill(pid, number)


def idle_percent(servers: Mapping[str, ServerProcess]) -> dict[str, float]:
    """CPU use of each idle server, in percent of one core."""
    time.sleep(_SETTLE_S)  # pools of threads spin for a while after their last work
    before, started = {name: server.cpu_s().all for name, server in servers.items()}, time.perf_counter()
    time.sleep(_SETTLE_S)
    passed = time.perf_counter() - started
    return {name: 100 * (server.cpu_s().all - before[name]) / passed for name, server in servers.items()}


def round_name(number: int, tokens: int) -> str:
    """Name of the step that holds a round."""
    return f"round {number}, {tokens} tokens"


class Samples:
    """The rounds of every length.

    Figures are compared within a round, where both sides met the same state of the machine; a difference of two medians
    would mix rounds. A round that others disturbed counts only if there is no quiet one.
    """

    def __init__(self, rounds: Mapping[int, Sequence[Round]]) -> None:
        """Takes rounds by the number of tokens."""
        self.rounds = dict(sorted(rounds.items()))

    @classmethod
    def of(cls, store: Store) -> Samples:
        """All rounds measured so far."""
        rounds: dict[int, list[Round]] = {}
        for name, samples in store.named("round ").items():
            measured = {subject: Sample(*figures) for subject, figures in samples.items()}
            rounds.setdefault(int(name.split()[1]), []).append(measured)
        return cls(rounds)

    def subjects(self, tokens: int) -> list[str]:
        return list(self.rounds[tokens][0])

    def every(self) -> list[Sample]:
        """All samples of all subjects."""
        return [sample for rounds in self.rounds.values() for samples in rounds for sample in samples.values()]

    def counts(self) -> str:
        """The number of rounds per length, in words."""
        return " or ".join(map(str, sorted({len(rounds) for rounds in self.rounds.values()})))

    def quiet(self) -> str:
        """The number of undisturbed measurements, in words."""
        every = self.every()
        return (
            f"{sum(sample.quiet for sample in every)} of {len(every)} measurements were undisturbed; disturbed ones"
            " count only if there is no other"
        )

    def values(self, tokens: int, subjects: Sequence[str], figure: Callable[..., float]) -> list[float]:
        """A figure of several subjects' samples, round by round."""
        rounds = [[samples[subject] for subject in subjects] for samples in self.rounds[tokens]]
        quiet = [samples for samples in rounds if all(sample.quiet for sample in samples)]
        return [figure(*samples) for samples in quiet or rounds]

    def spread(self, tokens: int, subject: str, figure: str) -> Spread:
        """A field of a subject's samples."""
        return Spread.of(self.values(tokens, [subject], lambda sample: float(getattr(sample, figure))))

    def ratio(self, tokens: int, one: str, other: str, figure: str) -> Spread:
        """A field of one subject divided by that of another."""
        return Spread.of(self.values(tokens, [one, other], lambda a, b: getattr(a, figure) / getattr(b, figure)))

    def above(self, tokens: int, one: str, other: str, figure: str) -> Spread:
        """A field of one subject minus that of another."""
        return Spread.of(self.values(tokens, [one, other], lambda a, b: getattr(a, figure) - getattr(b, figure)))
