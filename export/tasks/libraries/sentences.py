"""Sentence Transformers: models that read texts themselves, for embeddings and rerankers."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bertserve.export.tasks.libraries.library import Library, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.tasks.libraries.library import Tokens
    from bertserve.export.texts.corpus import Text

BATCH = 1
"""Texts at once: padding would overwrite a text's own padding tokens, and may change any answer that depends on it."""


class SentenceTransformers(Library):
    """A Sentence Transformers model, which reads texts itself."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        import sentence_transformers  # noqa: PLC0415  slow to import

        self.name = f"{self.title} {sentence_transformers.__version__}"
        self._checkpoint = checkpoint
        with _reports() as reports:
            self._model = getattr(sentence_transformers, self._kind)(
                str(folder), device="cpu", local_files_only=True, trust_remote_code=False
            ).float()
        self.missing = any(self._needs(line) for report in reports for line in report.splitlines())
        self.tokenizer = self._model.tokenizer

    title = "Sentence Transformers"
    _kind: str

    def _needs(self, line: str) -> bool:
        """Whether a line of Transformers' table reports missing weights: `name | MISSING |`."""
        return "MISSING" in line and "|" in line

    def encode(self, text: Text) -> list[Tokens]:
        return [tokens(self._model.preprocess([text]))]


@contextmanager
def _reports() -> Iterator[list[str]]:
    """Collects the log messages of both libraries in the block.

    If one library calls the other, only the log says what is missing.
    """
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
