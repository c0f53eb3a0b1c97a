"""The task classify: a head with a logit for each label, or with the values of a regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bertserve.export.tasks import metrics
from bertserve.export.tasks.accuracy import Examples, ScoreReader
from bertserve.export.tasks.base import TaskExport
from bertserve.export.tasks.decisions import DecisionComparator, Scores
from bertserve.export.tasks.libraries.answers import FEW, Variant, labels
from bertserve.export.tasks.libraries.library import tokens
from bertserve.export.tasks.libraries.pipelines import Transformers
from bertserve.export.tasks.limits import UNDIRECTED, limits_for
from bertserve.serving.tasks.classify import ClassifyOptions
from bertserve.serving.tasks.parts import present

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bertserve.export.tasks.libraries.answers import Answer
    from bertserve.export.tasks.libraries.library import Tokens
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.records import EncodedText, Row


@dataclass(slots=True, frozen=True)
class _Comparator(Scores):
    """The label of a text, or each label's state for several labels; for a regression, the order of values."""

    def agreement(self, actual: Sequence[Row], expected: Sequence[Row], texts: Sequence[EncodedText]) -> float | None:
        order = Scores if self.problem == "regression" else DecisionComparator
        return order.agreement(self, actual, expected, texts)

    def decisions(self, row: Row, _: EncodedText) -> NDArray[np.int64]:
        return (row[0] > 0).astype(np.int64) if self.problem == "multi_label" else np.array([row[0].argmax()])


@dataclass(slots=True, frozen=True)
class _Reader(ScoreReader):
    """Sentence, optional second sentence, and a label (name or number), for accuracy; or the value of a regression."""

    score_column: ClassVar[int] = -1

    def rows(self, name: str, rows: list[list[str]]) -> Examples:
        if self.labels.problem == "regression":
            if len(self.labels.names) != 1:
                raise ValueError("a table has one value per row, but the model returns several")
            return ScoreReader.rows(self, name, rows)
        if self.labels.problem == "multi_label":
            raise ValueError("a table cannot have several labels per text")
        expected = [self._label(row[-1]) for row in rows]
        texts = self._encode([self.inputs(row) for row in rows])
        return Examples(
            name,
            len(rows),
            texts,
            lambda answers: {"accuracy": metrics.accuracy([int(row[0].argmax()) for row in answers], expected)},
        )

    def _label(self, word: str) -> int:
        names = self.labels.names
        if word in names:
            return names.index(word)
        if not word.isdigit() or int(word) >= len(names):
            raise ValueError(f"the model has no label {word!r}")
        return int(word)


class Classifier(Transformers):
    _kind, _pipeline = "AutoModelForSequenceClassification", "text-classification"

    def variants(self) -> list[Variant]:
        return [Variant(ClassifyOptions()), Variant(ClassifyOptions(function="none"), "as raw scores", most=FEW)]

    def asked(self, text: Text) -> Text | None:
        """Leaves out pairs with an empty second text, which Transformers takes for a single text."""
        return text if isinstance(text, str) or text[1] else None

    def encode(self, text: Text) -> list[Tokens]:
        return [tokens(self._pipe.preprocess(_keyed(text), truncation=True))]

    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        problem = self.checkpoint.labels.problem
        asked = variant.options.function if isinstance(variant.options, ClassifyOptions) else None
        # `--task regression` requests values, whatever the folder says.
        function = asked or ("none" if problem == "regression" else None)
        replies = self._pipe(list(map(_keyed, texts)), top_k=None, truncation=True, function_to_apply=function)
        chosen = problem == "single_label"
        return [labels(((str(one["label"]), one["score"]) for one in reply), chosen=chosen) for reply in replies]


def _keyed(text: Text) -> dict[str, str]:
    return {"text": text} if isinstance(text, str) else {"text": text[0], "text_pair": text[1]}


def _read(answer: Any, manifest: Any) -> Answer:  # noqa: ANN401  see `TaskExport`
    chosen = present(manifest.labels).problem == "single_label"
    return labels(((one.label, one.score) for one in answer), chosen=chosen)


EXPORT = TaskExport(
    limits=limits_for(fp16={"max_abs_difference": 0.05, **UNDIRECTED}, int8={"agreement": 0.95, **UNDIRECTED}),
    comparator=_Comparator,
    reader=_Reader,
    library=Classifier,
    read=_read,
)
