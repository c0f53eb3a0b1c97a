"""ERNIE: BERT's graph; later versions add a task embedding (arXiv 1904.09223, 1907.12412)."""

from __future__ import annotations

from dataclasses import replace

from bertserve.export.checkpoint.families import bert
from bertserve.export.checkpoint.families.family import BERT_FIXED

FAMILY = replace(
    bert.FAMILY,
    model_type="ernie",
    stem="Ernie",
    prefix="ernie.",
    unused=frozenset({"task_type_vocab_size"}),
    fixed={**BERT_FIXED, "use_task_id": False},
)

WITH_TASKS = replace(
    FAMILY,
    matches=lambda config: config.get("model_type") == "ernie" and config.get("use_task_id") is True,
    added={"embeddings.task_type_embeddings.weight": "embeddings.token_type_embeddings.weight"},
    derives=("use_task_id",),
    fixed=BERT_FIXED,
)
"""The variant with tasks: every text has the first one, the default of Transformers."""
