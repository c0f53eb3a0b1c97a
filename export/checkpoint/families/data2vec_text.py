"""data2vec for text: RoBERTa's graph (arXiv 2202.03555)."""

from __future__ import annotations

from dataclasses import replace

from bertserve.export.checkpoint.families import roberta

FAMILY = replace(roberta.FAMILY, model_type="data2vec-text", stem="Data2VecText", prefix="data2vec_text.")
