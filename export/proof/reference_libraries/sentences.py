"""Sentence Transformers: models whose own method reads texts, for vectors and rerankers."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from export.proof.reference_libraries.answers import FEW, Form, score, vector
from export.proof.reference_libraries.library import Library, tokens
from serving.records import EmbedOptions, EmbedTokensOptions, RerankOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from export.checkpoint.reader import Checkpoint
    from export.proof.reference_libraries.answers import Answer
    from export.proof.reference_libraries.library import Tokens
    from export.texts.corpus import Text

_BATCH = 8
_MOST_PROMPTS = 4


class SentenceTransformers(Library):
    """Sentence Transformers: a model whose own method reads texts."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        import sentence_transformers  # noqa: PLC0415  slow to import

        self.name = f"Sentence Transformers {sentence_transformers.__version__}"
        self._checkpoint = checkpoint
        with _reports() as reports:
            self._model = getattr(sentence_transformers, self._kind)(
                str(folder), device="cpu", local_files_only=True, trust_remote_code=False
            ).float()
        self.missing = any(self._needs(line) for report in reports for line in report.splitlines())
        self.tokenizer = self._model.tokenizer

    _kind: str

    def _needs(self, line: str) -> bool:
        """Whether a line of Transformers' table names weights that it did not find: `name | MISSING |`."""
        return "MISSING" in line and "|" in line

    def encode(self, text: Text) -> list[Tokens]:
        return [tokens(self._model.preprocess([text]))]


class Encoder(SentenceTransformers):
    _kind = "SentenceTransformer"

    def _needs(self, line: str) -> bool:
        """Vectors are not of the pooler, which many folders are saved without."""
        return super()._needs(line) and "pooler." not in line

    def forms(self) -> list[Form]:
        checkpoint = self._checkpoint
        others = [name for name in checkpoint.sentence.prompts if name != checkpoint.default_prompt][:_MOST_PROMPTS]
        usual = EmbedTokensOptions() if checkpoint.task == "embed_tokens" else EmbedOptions()
        forms = [Form(usual), *(Form(usual, f"with the prompt {name!r}", name, FEW) for name in others)]
        if checkpoint.task == "embed":
            size = checkpoint.matryoshka[0] if checkpoint.matryoshka else max(1, checkpoint.dimensions // 2)
            title = f"in {size} components and of length 1"
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
        asked: dict[str, Any] = {"prompt_name": form.prompt, "batch_size": _BATCH, "show_progress_bar": False}
        if isinstance(options, EmbedOptions):
            asked |= {"truncate_dim": options.dimensions} if options.dimensions else {}
            asked |= {"normalize_embeddings": bool(options.normalize)}
        else:
            asked |= {"output_value": "token_embeddings"}
        return [vector(row) for row in self._model.encode(list(texts), **asked)]


class CrossEncoder(SentenceTransformers):
    _kind = "CrossEncoder"

    def forms(self) -> list[Form]:
        return [Form(RerankOptions()), Form(RerankOptions(raw_scores=True), "as raw scores", most=FEW)]

    def asked(self, text: Text) -> Text | None:
        return text if isinstance(text, tuple) else None

    def answer(self, texts: Sequence[Text], form: Form) -> list[Answer]:
        asked: dict[str, Any] = {"batch_size": _BATCH, "show_progress_bar": False}
        if isinstance(form.options, RerankOptions) and form.options.raw_scores:
            asked["activation_fn"] = torch.nn.Identity()
        return [score(float(number)) for number in self._model.predict(list(texts), **asked)]


@contextmanager
def _reports() -> Iterator[list[str]]:
    """What both libraries log in the block: where one calls the other, a log alone says what is missing."""
    reports: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reports.append(record.getMessage())

    loggers = [logging.getLogger(name) for name in ("transformers", "sentence_transformers")]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    disabled = logging.root.manager.disable
    for logger in loggers:
        logger.handlers, logger.propagate = [Collector()], False
    logging.disable(logging.NOTSET)
    try:
        yield reports
    finally:
        logging.disable(disabled)
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
