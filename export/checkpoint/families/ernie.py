"""ERNIE: BERT's graph; versions that tell tasks apart by an embedding are not exported (arXiv 1904.09223)."""

from __future__ import annotations

from dataclasses import replace

from export.checkpoint.families import bert

FAMILY = replace(
    bert.FAMILY,
    model_type="ernie",
    stem="Ernie",
    prefix="ernie.",
    fixed={**bert.FAMILY.fixed, "use_task_id": False},
)
