"""XLM-RoBERTa and models trained from it: RoBERTa for many languages (arXiv 1911.02116)."""

from __future__ import annotations

from dataclasses import replace

from bertserve.export.checkpoint.families import roberta

FAMILY = replace(roberta.FAMILY, model_type="xlm-roberta", stem="XLMRoberta")
