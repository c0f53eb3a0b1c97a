"""The task embed: the encoder with its pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bertserve.export.tasks.accuracy import PairReader
from bertserve.export.tasks.base import TaskExport
from bertserve.export.tasks.decisions import Undecided
from bertserve.export.tasks.libraries.answers import FEW, MANY, Variant, vector
from bertserve.export.tasks.libraries.sentences import BATCH, SentenceTransformers
from bertserve.export.tasks.limits import limits_for
from bertserve.serving.records import MASK
from bertserve.serving.tasks.embed import EmbedOptions
from bertserve.serving.tasks.embed_sparse import EmbedSparseOptions
from bertserve.serving.tasks.embed_tokens import EmbedTokensOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.tasks.decisions import Numbers
    from bertserve.export.tasks.libraries.answers import Answer
    from bertserve.export.tasks.libraries.library import Tokens
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.records import Row
    from bertserve.serving.tasks.base import TaskOptions

_MAX_PROMPTS = 4


@dataclass(slots=True, frozen=True)
class _Comparator(Undecided):
    """The vectors of texts; the graph's other outputs have comparators of their own."""

    def numbers(self, row: Row) -> Numbers:
        return row[0].astype(np.float64)


@dataclass(slots=True, frozen=True)
class _Reader(PairReader):
    @staticmethod
    def similarities(answers: Sequence[Row], pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Cosines."""
        vectors = np.stack([row[0] for row in answers]).astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return [float(vectors[one] @ vectors[other]) for one, other in pairs]


class Encoder(SentenceTransformers):
    _kind = "SentenceTransformer"

    def _needs(self, line: str) -> bool:
        """Ignores the pooler, which embeddings do not use and many folders lack."""
        return super()._needs(line) and "pooler." not in line

    def variants(self) -> list[Variant]:
        checkpoint = self._checkpoint
        others = [name for name in checkpoint.sentence.prompts if name != checkpoint.default_prompt][:_MAX_PROMPTS]
        usual = EmbedOptions() if checkpoint.task == "embed" else EmbedTokensOptions()
        variants = [Variant(usual), *(Variant(usual, f"with the prompt {name!r}", name, FEW) for name in others)]
        if checkpoint.task == "embed":
            size = checkpoint.matryoshka[0] if checkpoint.matryoshka else max(1, checkpoint.dimensions // 2)
            title = f"truncated to {size} dimensions and normalized"
            variants.append(Variant(EmbedOptions(normalize=True, dimensions=size), title, most=FEW))
        return variants

    def asked(self, text: Text) -> Text | None:
        return text if isinstance(text, str) else None

    def encode(self, text: Text) -> list[Tokens]:
        model = self._model
        prompt = model.prompts[model.default_prompt_name] if model.default_prompt_name is not None else ""
        return super().encode(f"{prompt}{text}")

    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        options = variant.options
        asked: dict[str, Any] = {"prompt_name": variant.prompt, "batch_size": BATCH, "show_progress_bar": False}
        if isinstance(options, EmbedOptions):
            asked |= {"truncate_dim": options.dimensions} if options.dimensions else {}
            asked |= {"normalize_embeddings": bool(options.normalize)}
        else:
            asked |= {"output_value": "token_embeddings"}
        return [vector(row) for row in self._model.encode(list(texts), **asked)]


class _Library(Encoder):
    """The encoder, with FlagEmbedding's formulas for sparse vectors and those of tokens."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        super().__init__(checkpoint, folder)
        if checkpoint.token_heads:
            self.name += " with FlagEmbedding's formulas"
        if checkpoint.sentence.normalize and not checkpoint.sentence.pools:
            # Without modules.json Sentence Transformers pools by the mean, FlagEmbedding by the first token.
            from sentence_transformers.sentence_transformer.modules import Normalize, Pooling  # noqa: PLC0415  slow

            self._model[1] = Pooling(checkpoint.encoder.hidden_size, "cls")
            self._model.append(Normalize())

    def variants(self) -> list[Variant]:
        options: dict[str, TaskOptions[Any]] = {"sparse": EmbedSparseOptions(), "tokens": EmbedTokensOptions()}
        outputs = [head.output for head in self._checkpoint.token_heads]
        return [*super().variants(), *(Variant(options[output], f"as {output}", most=MANY) for output in outputs)]

    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        if isinstance(variant.options, EmbedOptions):
            return super().answer(texts, variant)
        output = "sparse" if isinstance(variant.options, EmbedSparseOptions) else "tokens"
        layer = next(head for head in self._checkpoint.token_heads if head.output == output).tensors()
        weight, bias = layer["weight"].numpy(), layer["bias"].numpy()
        asked: dict[str, Any] = {"output_value": "token_embeddings", "batch_size": BATCH, "show_progress_bar": False}
        rows = [hidden.numpy() @ weight.T + bias for hidden in self._model.encode(list(texts), **asked)]
        if output == "tokens":
            return [vector(row[1:] / np.linalg.norm(row[1:], axis=1, keepdims=True)) for row in rows]
        return [vector(self._weights(text, row)) for text, row in zip(texts, rows, strict=True)]

    def _weights(self, text: Text, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """The largest weight of each token, for all of the vocabulary."""
        weights = np.zeros(self._checkpoint.encoder.vocab_size, np.float32)
        named = self.tokenizer.special_tokens_map
        roles = [role for role in ("cls_token", "eos_token", "pad_token", "unk_token") if role in named]
        ((ids, _),) = self.encode(text)
        for token, weight in zip(ids, row[:, 0].tolist(), strict=True):
            weights[token] = max(weights[token], weight)
        weights[self.tokenizer.convert_tokens_to_ids([named[role] for role in roles])] = 0
        return weights


def _forward(own: Any, common: Mapping[str, Any], named: Mapping[str, Any]) -> tuple[Any, ...]:  # noqa: ANN401  see `Forward`
    hidden = own.model(**common).last_hidden_state
    return own.sentence(hidden, named[MASK]), *(() if own.heads is None else own.heads(hidden))


EXPORT = TaskExport(
    forward=_forward,
    limits=limits_for(int8={"cosine_mean": 0.99, "cosine_p01": 0.975, "cosine_min": 0.95}),
    comparator=_Comparator,
    reader=_Reader,
    library=_Library,
    read=lambda answer, _: vector(answer),
    vectors=True,
)
