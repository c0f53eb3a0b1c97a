"""TEST01 of MLPerf's compliance tests: answers of performance mode are those of accuracy mode, at the same speed.

It is the only one that the rules ask of BERT: TEST04 leaves out models whose inputs differ in length, TEST05 is not
needed since v5.0 (https://github.com/mlcommons/inference, compliance/README.md and compliance/TEST04/README.md, and
LoadGen's own configuration). LoadGen repeats the performance run and logs the answers to a part of its samples. Each
is compared with that of the accuracy run, byte by byte. The test lets rounding differ: where some do, the task's
metric over the logged answers must be within 1% of what the accuracy run's answers to the same samples reach.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadtest.errors import BenchError
from loadtest.mlperf.accuracy import GATE, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.mlperf.accuracy import Accuracy, Entry
    from loadtest.mlperf.library import Library
    from loadtest.mlperf.verdict import Log, Verdict

TEST = "TEST01"

AUDIT = """\
*.*.mode = 2
*.*.accuracy_log_rng_seed = 720381539243781796
*.*.accuracy_log_sampling_target = 1024
"""
"""What LoadGen is told beside the run's own settings: the seed is that of all of MLCommons' files for this test, how
many answers to log is ours."""

_TOLERANCE, _BRIEFLY = 0.10, 0.20
_BRIEF_NS = {"SingleStream": 200_000, "MultiStream": 1_600_000}
"""Where latency is below this, the figure may differ by `_BRIEFLY`."""

_PASS = {True: "TEST PASS", False: "TEST FAIL"}


@dataclass(slots=True, frozen=True)
class Compliance:
    """A run of the test beside the runs that it repeats.

    Attributes:
        answered: Samples of the accuracy run.
        compared: Answers of the test's run that were logged.
        different: Of those, how many are not the accuracy run's byte by byte.
        baseline: How the accuracy run's answers to the samples that were logged are judged.
        judged: How the answers that were logged are.
        score: What the performance run is judged by, in LoadGen's unit.
        repeated: The same of the test's run.
        valid: Whether LoadGen calls both VALID.
        tolerance: By what share the two may differ.
    """

    answered: int
    compared: int
    different: int
    baseline: Accuracy
    judged: Accuracy
    score: float
    repeated: float
    valid: bool
    tolerance: float

    @property
    def is_same(self) -> bool:
        """Whether the answers are, or are as good."""
        return not self.different or abs(self.judged.found - self.baseline.found) <= (1 - GATE) * self.judged.found

    @property
    def is_as_fast(self) -> bool:
        """Whether the figures are the same, and both runs valid."""
        return self.valid and abs(self.repeated - self.score) <= self.tolerance * self.score

    @property
    def held(self) -> bool:
        """Whether the test is passed."""
        return self.is_same and self.is_as_fast

    def text(self) -> str:
        """What a terminal shows."""
        others = ""
        if self.different:
            name = self.judged.name
            others = f" in their bytes ({name} {self.judged.found:.4f}, theirs {self.baseline.found:.4f})"
        return (
            f"{'PASSED' if self.held else 'FAILED'}, {self.different:,} of {self.compared:,} answers are not accuracy"
            f" mode's{others}, the figure is {100 * self.repeated / self.score:.1f}% of the performance run's"
            f"{'' if self.valid else ', which are not both VALID'}"
        )

    def verify_accuracy(self) -> str:
        """The file of this name, with the figures of MLCommons' script."""
        figures = {
            "num_acc_log_entries": self.answered,
            "num_perf_log_entries": self.compared,
            "num_perf_log_qsl_idx_match": self.compared,
            "num_perf_log_data_mismatch": self.different,
            "num_missing_qsl_idxs": 0,
        }
        return "".join(f"{name} = {value}\n" for name, value in figures.items()) + _PASS[not self.different] + "\n"

    def verify_performance(self) -> str:
        """The file of this name, likewise."""
        return f"Reference score = {self.score}\nTest score = {self.repeated}\n{_PASS[self.is_as_fast]}\n"


def verify(
    library: Library,
    fp32: Sequence[bytes],
    answers: Sequence[bytes],
    logged: Sequence[Entry],
    runs: Sequence[tuple[Verdict, Log]],
) -> Compliance:
    """Compares the test's run with those that it repeats.

    Args:
        library: What was asked.
        fp32: What the same model in fp32 answers, by sample.
        answers: The accuracy run's, by sample.
        logged: The test's.
        runs: What LoadGen says of the performance run, and of the test's.

    Raises:
        BenchError: No answer was logged, or one cannot be judged.
    """
    if not logged:
        raise BenchError(f"LoadGen logged no answer of {TEST}: run it for longer, with a larger --seconds")
    indices = [index for index, _ in logged]
    sampled = dataclasses.replace(
        library,
        samples=tuple(library.samples[index] for index in indices),
        gold=tuple(library.gold[index] for index in indices) if library.gold else (),
    )
    exact, baseline = [fp32[index] for index in indices], [answers[index] for index in indices]
    score, repeated = (log.score for _, log in runs)
    return Compliance(
        answered=len(answers),
        compared=len(logged),
        different=sum(answers[index] != data for index, data in logged),
        baseline=judge(sampled, baseline, exact),
        judged=judge(sampled, [data for _, data in logged], exact),
        score=score,
        repeated=repeated,
        valid=all(verdict.valid for verdict, _ in runs),
        tolerance=_BRIEFLY if score <= _BRIEF_NS.get(runs[0][1].scenario, 0) else _TOLERANCE,
    )
