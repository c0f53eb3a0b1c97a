"""The task embed: the encoder with its pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from export.tasks import metrics
from export.tasks.accuracy import Examples, Reader
from export.tasks.base import TaskExport
from export.tasks.decisions import Undecided
from export.tasks.libraries.answers import FEW, Form, vector
from export.tasks.libraries.sentences import BATCH, SentenceTransformers
from export.tasks.limits import limits_for
from serving.records import MASK
from serving.tasks.embed import EmbedOptions
from serving.tasks.embed_tokens import EmbedTokensOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from export.tasks.libraries.answers import Answer
    from export.tasks.libraries.library import Tokens
    from export.texts.corpus import Text
    from serving.records import Row

_MAX_PROMPTS = 4


@dataclass(slots=True, frozen=True)
class _Reader(Reader):
    """Sentence, sentence, score; Spearman of the cosine."""

    def rows(self, name: str, rows: list[list[str]]) -> Examples:
        indices = {text: index for index, text in enumerate(dict.fromkeys(text for row in rows for text in row[:2]))}
        pairs = [(indices[row[0]], indices[row[1]], float(row[2])) for row in rows]

        def score(answers: Sequence[Row]) -> dict[str, float]:
            vectors = np.stack([row[0] for row in answers]).astype(np.float64)
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            actual = [float(vectors[one] @ vectors[other]) for one, other, _ in pairs]
            return {"spearman": metrics.spearman(actual, [expected for *_, expected in pairs])}

        return Examples(name, len(pairs), self._encode([self.prompt + text for text in indices]), score)


class Encoder(SentenceTransformers):
    _kind = "SentenceTransformer"

    def _needs(self, line: str) -> bool:
        """Ignores the pooler, which embeddings do not use and many folders lack."""
        return super()._needs(line) and "pooler." not in line

    def forms(self) -> list[Form]:
        checkpoint = self._checkpoint
        others = [name for name in checkpoint.sentence.prompts if name != checkpoint.default_prompt][:_MAX_PROMPTS]
        usual = EmbedOptions() if checkpoint.task == "embed" else EmbedTokensOptions()
        forms = [Form(usual), *(Form(usual, f"with the prompt {name!r}", name, FEW) for name in others)]
        if checkpoint.task == "embed":
            size = checkpoint.matryoshka[0] if checkpoint.matryoshka else max(1, checkpoint.dimensions // 2)
            title = f"truncated to {size} dimensions and normalized"
            forms.append(Form(EmbedOptions(normalize=True, dimensions=size), title, most=FEW))
        return forms

    def asked(self, text: Text) -> Text | None:
        return text if isinstance(text, str) else None

    def encode(self, text: Text) -> list[Tokens]:
        model = self._model
        prompt = model.prompts[model.default_prompt_name] if model.default_prompt_name is not None else ""
        return super().encode(f"{prompt}{text}")

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        options = form.options
        asked: dict[str, Any] = {"prompt_name": form.prompt, "batch_size": BATCH, "show_progress_bar": False}
        if isinstance(options, EmbedOptions):
            asked |= {"truncate_dim": options.dimensions} if options.dimensions else {}
            asked |= {"normalize_embeddings": bool(options.normalize)}
        else:
            asked |= {"output_value": "token_embeddings"}
        return [vector(row) for row in self._model.encode(list(texts), **asked)]


EXPORT = TaskExport(
    forward=lambda own, common, named: (own.sentence(own.model(**common).last_hidden_state, named[MASK]),),
    limits=limits_for(int8={"cosine_mean": 0.99, "cosine_p01": 0.975, "cosine_min": 0.95}),
    comparator=Undecided,
    reader=_Reader,
    library=Encoder,
    read=lambda answer, _: vector(answer),
    vectors=True,
)
