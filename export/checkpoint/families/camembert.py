"""CamemBERT: RoBERTa for French (arXiv 1911.03894)."""

from __future__ import annotations

from dataclasses import replace

from bertserve.export.checkpoint.families import roberta

FAMILY = replace(roberta.FAMILY, model_type="camembert", stem="Camembert")
