"""The task fill_mask: the vocabulary head at the mask tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bertserve.export.tasks import metrics
from bertserve.export.tasks.accuracy import Examples, Reader
from bertserve.export.tasks.base import TaskExport
from bertserve.export.tasks.decisions import DecisionComparator
from bertserve.export.tasks.libraries.answers import Variant, fillings
from bertserve.export.tasks.libraries.library import tokens
from bertserve.export.tasks.libraries.pipelines import Transformers
from bertserve.export.tasks.limits import UNDIRECTED, limits_for
from bertserve.serving.records import POSITIONS
from bertserve.serving.tasks.fill_mask import FillMaskOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bertserve.export.tasks.libraries.answers import Answer
    from bertserve.export.tasks.libraries.library import Tokens
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.records import EncodedText, Row

_LONGEST_WITH_ONE_MASK = 16


def _forward(own: Any, common: Any, named: Any) -> tuple[Any, ...]:  # noqa: ANN401  see `TaskExport`
    """The best words of each mask. The head runs only at the masks, because it costs more than the encoder."""
    encoder: Any = getattr(own.model, own.family.prefix.removesuffix("."))
    hidden = encoder(**common).last_hidden_state
    index = named[POSITIONS].long().unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    logits = own.family.word_logits(own.model, hidden.gather(1, index))
    best, ids = logits.topk(own.candidates, dim=-1)
    largest = best[..., :1]
    total = (logits - largest).exp().sum(-1).log() + largest.squeeze(-1)
    return ids.int(), best, total


@dataclass(slots=True, frozen=True)
class _Comparator(DecisionComparator):
    """The best word of each mask."""

    masked: ClassVar[bool] = True

    def decisions(self, row: Row, _: EncodedText) -> NDArray[np.int64]:
        return row[0][:, 0].astype(np.int64)


@dataclass(slots=True, frozen=True)
class _Reader(Reader):
    """Text with one mask token, and the word; accuracy."""

    def rows(self, name: str, rows: list[list[str]]) -> Examples:
        # In a byte-level vocabulary, a word inside a text starts with a space.
        words = [f" {row[1]}" for row in rows]
        tokenizer = self.vocabulary.tokenizer_for(words)
        expected = [tokenizer.encode(word, add_special_tokens=False).ids[0] for word in words]
        texts = self._encode([row[0] for row in rows])
        if any(text.ids.count(self.vocabulary.special_ids["mask"]) != 1 for text in texts):
            raise ValueError("a text must have exactly one mask token")
        return Examples(
            name,
            len(rows),
            texts,
            lambda answers: {"accuracy": metrics.accuracy([int(row[0][0, 0]) for row in answers], expected)},
        )


class Filler(Transformers):
    _kind, _pipeline = "AutoModelForMaskedLM", "fill-mask"

    def variants(self) -> list[Variant]:
        return [Variant(FillMaskOptions(top_k=min(FillMaskOptions().top_k, self.checkpoint.candidates)))]

    def asked(self, text: Text) -> Text | None:
        """Adds a mask at the end, and one at the start of a longer text, so that one survives truncation at either end.

        A request may write any model's mask as BERT's `[MASK]`, which Transformers does not support.
        """
        mask = str(self.tokenizer.mask_token)
        if not isinstance(text, str) or ("[MASK]" in text and mask != "[MASK]"):
            return None
        # Each byte makes at most one token. Beside the text there are a blank, the mask and two special tokens.
        short = min(_LONGEST_WITH_ONE_MASK, self.longest - 4)
        before = "" if len(text.encode()) <= short else f"{mask} "
        return f"{before}{text} {mask}"

    def encode(self, text: Text) -> list[Tokens]:
        return [tokens(self._pipe.preprocess(text, tokenizer_kwargs={"truncation": True}))]

    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        top_k = variant.options.top_k if isinstance(variant.options, FillMaskOptions) else None
        return [self._answer(text, top_k) for text in texts]

    def _answer(self, text: Text, top_k: int | None) -> Answer:
        found = self._pipe(text, top_k=top_k, tokenizer_kwargs={"truncation": True})
        masks = found if isinstance(found[0], list) else [found]
        return fillings(
            [(one["score"], one["token"], one["token_str"], one["sequence"]) for one in best] for best in masks
        )


EXPORT = TaskExport(
    forward=_forward,
    limits=limits_for(
        # Logits of words are sums over the whole width of the model, and can be as large as 30.
        fp32={"max_abs_difference": 1e-3, "invariance_difference": 1e-3},
        fp16={"max_abs_difference": 0.1, "agreement": 0.99, **UNDIRECTED},
        int8={"agreement": 0.8, "metric_loss": 1, **UNDIRECTED},
    ),
    comparator=_Comparator,
    reader=_Reader,
    library=Filler,
    read=lambda answer, _: fillings(
        [(one.score, one.token, one.token_str, one.sequence) for one in best] for best in answer
    ),
)
