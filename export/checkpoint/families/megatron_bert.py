"""Megatron's BERT: a layer normalizes its input (arXiv 1909.08053)."""

from __future__ import annotations

from dataclasses import replace

from bertserve.export.checkpoint.families import bert

FAMILY = replace(
    bert.FAMILY,
    model_type="megatron-bert",
    stem="MegatronBert",
    # The first layer uses the sum of the embeddings, which the fused operator does not return.
    embedding={},
)
