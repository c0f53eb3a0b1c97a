"""The task embed_tokens: the encoder without a head, or with the projection of a multi-vector model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bertserve.export.tasks import metrics
from bertserve.export.tasks.accuracy import Examples, Reader
from bertserve.export.tasks.base import TaskExport
from bertserve.export.tasks.decisions import Undecided, cosine
from bertserve.export.tasks.embed import Encoder
from bertserve.export.tasks.libraries.answers import FEW, Variant, vector
from bertserve.export.tasks.libraries.sentences import BATCH
from bertserve.export.tasks.limits import limits_for
from bertserve.serving.tasks.embed_tokens import EmbedTokensOptions, vectors
from bertserve.serving.tasks.maxsim import maxsim

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.tasks.decisions import Numbers
    from bertserve.export.tasks.libraries.answers import Answer
    from bertserve.export.tasks.libraries.library import Tokens
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.records import Row

_SIDES = ("document", "query")


@dataclass(slots=True, frozen=True)
class _Comparator(Undecided):
    def numbers(self, row: Row) -> Numbers:
        return row[self.at("token_embeddings")].ravel().astype(np.float64)

    def cosine(self, row: Row, other: Row) -> float:
        """The cosine of the worst token, because each token has a direction of its own."""
        at = self.at("token_embeddings")
        return float(cosine(row[at], other[at]).min())


@dataclass(slots=True, frozen=True)
class _Reader(Reader):
    """Query, text, score; Spearman of MaxSim, for multi-vector models."""

    def rows(self, name: str, rows: list[list[str]]) -> Examples:
        sides = self.multi_vector
        if sides is None:
            # Not `super()`, which a dataclass with slots breaks.
            return Reader.rows(self, name, rows)
        queries, texts = (list(dict.fromkeys(row[column] for row in rows)) for column in (0, 1))
        pairs = [(queries.index(row[0]), texts.index(row[1]), float(row[2])) for row in rows]
        asked = self.vocabulary.encode_side(queries, sides, self.prompts, query=True)
        encoded = [*asked, *self.vocabulary.encode_side(texts, sides, self.prompts, query=False)]

        def score(answers: Sequence[Row]) -> dict[str, float]:
            found = [
                vectors(text, row[0], sides, query=at < len(asked))
                for at, (text, row) in enumerate(zip(encoded, answers, strict=True))
            ]
            actual = [maxsim(found[query], found[len(asked) + text]) for query, text, _ in pairs]
            return {"spearman": metrics.spearman(actual, [expected for *_, expected in pairs])}

        return Examples(name, len(pairs), encoded, score)


class TokenEncoder(Encoder):
    """Sentence Transformers' encoder of tokens; for a multi-vector model its MultiVectorEncoder."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self._has_sides = checkpoint.multi_vector is not None
        if self._has_sides:
            self._kind = "MultiVectorEncoder"
        super().__init__(checkpoint, folder)

    @property
    def longest(self) -> int:
        """Tokens of its longest document."""
        own = self._model[0].document_length if self._has_sides else None
        return int(own or self.tokenizer.model_max_length)

    @longest.setter
    def longest(self, length: int) -> None:
        if self._has_sides:
            transformer, most = self._model[0], self._checkpoint.max_length
            transformer.document_length = length
            transformer.query_length = min(transformer.query_length or self.tokenizer.model_max_length, most)
        self.tokenizer.model_max_length = length

    def variants(self) -> list[Variant]:
        if not self._has_sides:
            return super().variants()
        others = [name for name in self._checkpoint.sentence.prompts if name not in _SIDES][:FEW]
        documents = EmbedTokensOptions()
        return [
            Variant(documents),
            Variant(EmbedTokensOptions(query=True), "as a query", "query"),
            *(Variant(documents, f"with the prompt {name!r}", name, FEW) for name in others),
        ]

    def tokenized(self) -> list[Variant]:
        return self.variants()[: len(_SIDES) if self._has_sides else 1]

    def encode(self, text: Text) -> list[Tokens]:
        return [self._read(text, side) for side in _SIDES] if self._has_sides else super().encode(text)

    def _read(self, text: Text, side: str) -> Tokens:
        from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask  # noqa: PLC0415  slow to import

        features: Mapping[str, Any] = self._model.preprocess([text], prompt=self._model.prompts[side], task=side)
        ids, seen = (features[name][0].tolist() for name in ("input_ids", "attention_mask"))
        added = [False] * len(ids)
        if any(isinstance(module, MultiVectorMask) for module in self._model):
            added = features.get("query_expansion_positions", [added])[0]
        types = features["token_type_ids"][0].tolist() if "token_type_ids" in features else [0] * len(ids)
        places = [at for at in range(len(ids)) if seen[at] or added[at]]
        return [ids[at] if seen[at] else ~ids[at] for at in places], [types[at] for at in places]

    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        if not self._has_sides:
            return super().answer(texts, variant)
        query = isinstance(variant.options, EmbedTokensOptions) and variant.options.query
        encode = self._model.encode_query if query else self._model.encode_document
        asked: dict[str, Any] = {"batch_size": BATCH, "show_progress_bar": False, "convert_to_numpy": True}
        return [vector(row) for row in encode(list(texts), prompt_name=variant.prompt, **asked)]


def _forward(own: Any, common: Mapping[str, Any], _: Mapping[str, Any]) -> tuple[Any, ...]:  # noqa: ANN401  see `Forward`
    hidden = own.model(**common).last_hidden_state
    return (hidden if own.sentence is None else own.sentence(hidden),)


EXPORT = TaskExport(
    forward=_forward,
    # These limits apply to the worst token of each text, which pooling would average with the others.
    limits=limits_for(int8={"cosine_mean": 0.98, "cosine_p01": 0.94, "cosine_min": 0.85}),
    comparator=_Comparator,
    reader=_Reader,
    library=TokenEncoder,
    read=lambda answer, _: vector(answer),
    vectors=True,
)
