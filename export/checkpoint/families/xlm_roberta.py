"""XLM-RoBERTa, and what was trained on from it: RoBERTa's graph over many languages' words (arXiv 1911.02116)."""

from __future__ import annotations

from dataclasses import replace

from export.checkpoint.families import roberta

FAMILY = replace(roberta.FAMILY, model_type="xlm-roberta", stem="XLMRoberta")
