"""The reference for every artifact of a model: PyTorch's answers, and its scores on labeled text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.export.proof import parity
from bertserve.serving.models.manifest import Accuracy, EndToEnd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.export.proof.end_to_end import EndToEndProof
    from bertserve.export.tasks.accuracy import Examples
    from bertserve.export.tasks.decisions import DecisionComparator
    from bertserve.export.tasks.limits import Limits
    from bertserve.serving.engine.base import Engine


@dataclass(slots=True, frozen=True)
class Labelled:
    """Labeled text, and PyTorch's score of each metric on it."""

    examples: Examples
    pytorch: Mapping[str, float]


@dataclass(slots=True, frozen=True)
class Result:
    """The comparison of an artifact.

    Attributes:
        verdict: Its raw answers.
        broken: The broken limits by name, each with a sentence.
        end_to_end: Its answers from the text on; None if those were not compared.
    """

    verdict: parity.Verdict
    accuracy: tuple[Accuracy, ...]
    broken: Mapping[str, str]
    end_to_end: EndToEnd | None = None


@dataclass(slots=True, frozen=True)
class ReferenceEvaluation:
    """PyTorch's side of the comparison.

    Attributes:
        end_to_end_proof: The reference library's answers to texts; None if it is not used.
    """

    comparator: DecisionComparator
    reference: parity.Reference
    labelled: Sequence[Labelled]
    max_length: int
    end_to_end_proof: EndToEndProof | None = None

    def compare(
        self, engine: Engine, limits: Mapping[str, Limits], count: parity.Count, *, exact: bool = False
    ) -> Result:
        """Runs an artifact over all texts; the arguments are those of `parity.verify`, and of `EndToEndProof.compare`.

        Raises:
            ExportError: The engine failed on a batch.
        """
        verdict = parity.verify(
            engine, self.comparator, self.reference, limits, max_length=self.max_length, count=count
        )
        accuracy = tuple(figure for each in self.labelled for figure in self._score(engine, each, count))
        broken = verdict.broken | parity.broken_accuracy(accuracy, next(iter(limits.values())))
        if self.end_to_end_proof is None:
            return Result(verdict, accuracy, broken)
        end_to_end, apart = self.end_to_end_proof.compare(engine, limits, exact=exact, batched=verdict.batch_invariant)
        return Result(verdict, accuracy, apart | broken, end_to_end)

    def _score(self, engine: Engine, labelled: Labelled, count: parity.Count) -> list[Accuracy]:
        examples, pytorch = labelled.examples, labelled.pytorch
        scores = examples.score(parity.answers(engine, self.comparator, examples.texts, count))
        return [
            Accuracy(metric, examples.name, examples.count, pytorch[metric], score)
            for metric, score in scores.items()
            if metric in pytorch
        ]
