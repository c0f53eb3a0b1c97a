"""DeBERTa v1: every distance has a place, and one product makes queries, keys and values (arXiv 2006.03654)."""

from __future__ import annotations

from dataclasses import replace

from export.checkpoint.families import deberta_v2
from export.checkpoint.families.family import BERT_SETTINGS, FIXED

FAMILY = replace(
    deberta_v2.FAMILY,
    model_type="deberta",
    stem="Deberta",
    settings=(*BERT_SETTINGS, *deberta_v2.RELATIVE_SETTINGS),
    derives=("embedding_size", "pooler_hidden_size"),
    fixed={**FIXED, "talking_head": False},
    products=4,
)
