"""The task rerank: a head with one logit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertserve.export.tasks.accuracy import ScoreReader
from bertserve.export.tasks.base import TaskExport
from bertserve.export.tasks.decisions import Scores
from bertserve.export.tasks.libraries.answers import FEW, Variant, score
from bertserve.export.tasks.libraries.sentences import BATCH, SentenceTransformers
from bertserve.export.tasks.limits import UNDIRECTED, limits_for
from bertserve.serving.tasks.rerank import RerankOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.export.tasks.libraries.answers import Answer
    from bertserve.export.texts.corpus import Text


class CrossEncoder(SentenceTransformers):
    _kind = "CrossEncoder"

    def variants(self) -> list[Variant]:
        return [Variant(RerankOptions()), Variant(RerankOptions(raw_scores=True), "as raw scores", most=FEW)]

    def asked(self, text: Text) -> Text | None:
        return text if isinstance(text, tuple) else None

    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        asked: dict[str, Any] = {"batch_size": BATCH, "show_progress_bar": False}
        if isinstance(variant.options, RerankOptions) and variant.options.raw_scores:
            import torch  # noqa: PLC0415  slow to import

            asked["activation_fn"] = torch.nn.Identity()
        return [score(float(number)) for number in self._model.predict(list(texts), **asked)]


EXPORT = TaskExport(
    limits=limits_for(fp16={"max_abs_difference": 0.05, **UNDIRECTED}, int8={"agreement": 0.95, **UNDIRECTED}),
    comparator=Scores,
    reader=ScoreReader,
    library=CrossEncoder,
    read=lambda answer, _: score(answer),
)
