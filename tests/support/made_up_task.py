"""A task that nothing else knows of: the length of a text's mean vector. All of it is in this file.

`tests/made_up_task_test.py` has every process import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.export.tasks import EXPORTS
from bertserve.export.tasks.accuracy import ScoreReader
from bertserve.export.tasks.base import TaskExport
from bertserve.export.tasks.decisions import Scores
from bertserve.export.tasks.libraries.answers import Variant, score
from bertserve.export.tasks.libraries.library import tokens
from bertserve.export.tasks.libraries.pipelines import Transformers
from bertserve.export.tasks.limits import UNDIRECTED, limits_for
from bertserve.serving.records import MASK
from bertserve.serving.tasks import add, replies
from bertserve.serving.tasks.base import (
    GraphOutput,
    LoadFormat,
    Output,
    Route,
    Task,
    TaskInputs,
    TaskOptions,
    TaskRoute,
    floats,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.export.tasks.libraries.answers import Answer
    from bertserve.export.tasks.libraries.library import Tokens
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.tasks.base import Work


class NormOptions(TaskOptions[list[float]], frozen=True):
    """The answer is a number for each text."""

    factor: float = 1.0


class NormRequest(msgspec.Struct, forbid_unknown_fields=True):
    inputs: str | list[str]
    factor: float = 1.0


def _finish(work: Work[NormOptions]) -> list[float]:
    return [work.options.factor * float(row[0][0]) for row in work.rows]


def _read(message: NormRequest, _: bool) -> TaskInputs:  # noqa: FBT001  see `Route`
    inputs = [message.inputs] if isinstance(message.inputs, str) else message.inputs
    return TaskInputs(inputs, NormOptions(message.factor))


add(
    Task(
        way=TaskRoute(NormOptions, "norm", _finish),
        graph=(GraphOutput("length", (1,)),),
        path="/norm",
        example={"inputs": ["What is a T4?", "A graphics card."]},
        route=Route(NormRequest, list[float], _read, lambda _, answer: answer, "The lengths of texts' mean vectors."),
        outputs=(Output("norm", "FP32"),),
        write=lambda answer, _: (floats(answer),),
        recorded=lambda _, __, count: [2.5] * count,
        column=lambda _, __: ("norm", float),
        load=LoadFormat(
            body=lambda item: {"inputs": [item["text"]]},
            answers=replies.listed,
            row=lambda norm: norm,
            check=replies.number,
        ),
    )
)


def _norm(hidden: Any, mask: Any) -> Any:
    """PyTorch's: [batch, tokens, hidden size] and [batch, tokens] to [batch, 1]."""
    mask = mask.unsqueeze(-1).float()
    return ((hidden * mask).sum(1) / mask.sum(1)).norm(dim=-1, keepdim=True)


def _forward(own: Any, common: Mapping[str, Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    return (_norm(own.model(**common).last_hidden_state, named[MASK]),)


class _Library(Transformers):
    _kind = "AutoModel"

    def variants(self) -> list[Variant]:
        return [Variant(NormOptions()), Variant(NormOptions(2.0), "twice as long")]

    def _features(self, text: Text) -> Any:
        return self.tokenizer(text, truncation=True, return_tensors="pt")

    def encode(self, text: Text) -> list[Tokens]:
        return [tokens(self._features(text))]

    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        assert isinstance(variant.options, NormOptions)
        features = [self._features(text) for text in texts]
        found = [_norm(self.model(**one).last_hidden_state, one["attention_mask"]) for one in features]
        return [score(variant.options.factor * float(one)) for one in found]


@dataclass(slots=True, frozen=True)
class _Reader(ScoreReader):
    """Sentence, another one that nobody reads, and a number."""

    def inputs(self, row: list[str]) -> Text:
        return row[0]


EXPORTS["norm"] = TaskExport(
    forward=_forward,
    limits=limits_for(int8={"agreement": 0.8, **UNDIRECTED}),
    comparator=Scores,
    reader=_Reader,
    library=_Library,
    read=lambda answer, _: score(answer),
)
